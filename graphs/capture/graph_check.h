#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "analysis/sequence_order.h"
#include "graphs/sequence/node_names.h"
#include "offload/captured_copies.h"
#include "runtime/graph_node.h"
#include "runtime/handles.h"

namespace sidestream {

/// "kernel", "copy to the host" and so on.
[[nodiscard]] const char* kind_in_words(GraphNode::Kind kind);

/// Node `index` of `nodes` in words: what it is, and the operator and scope that it was captured in.
[[nodiscard]] std::string describe_node(const std::vector<GraphNode>& nodes, std::size_t index, const NodeNames& names);

/// Checks what a captured graph holds: nothing that makes the host wait, or that waits for the host (functions of the host, copies
/// from and to pageable memory), in child graphs neither; and pinned memory only within the leases of `copies`, which live as long
/// as the graph. `what` names the graph in the error. Not for the replay path.  Throws: CaptureError that names node, operator and
/// scope, and the remedy.
void check_nodes(const std::vector<GraphNode>& nodes, const NodeNames& names, const CapturedCopies& copies,
                 const std::string& what);

/// Checks the copies that replays queue beside a graph: their host memory is in live leases, their device memory in the storages that
/// were allocated for it. The sources exist from the forward's capture on, the targets from the backward's: `direction` says which one has
/// ended. Not for the replay path.  Throws: CaptureError that names the group.
void check_copy_ends(const CapturedCopies& copies, Direction direction, const std::string& what);

/// Checks the nodes of a captured graph (rule: an event that a graph does not record is a silent no-op): exactly one record of `done` and
/// of each event of `ready`; `done` descends from every node that does anything. `what` names the graph in the error, `names` its nodes.
/// Not for the replay path.  Throws: CaptureError.
void check_graph_events(const std::vector<GraphNode>& nodes, const NodeNames& names, const ExternalEvent& done,
                        const std::vector<const ExternalEvent*>& ready, const std::string& what);

}  // namespace sidestream
