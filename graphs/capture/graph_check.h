#pragma once
#include <string>
#include <vector>

#include "graphs/sequence/node_names.h"
#include "runtime/graph_node.h"
#include "runtime/handles.h"

namespace sidestream {

/// Checks the nodes of a captured graph (rule: an event that a graph does not record is a silent no-op): exactly one record of `done` and of
/// each event of `ready`; `done` descends from every node that does anything. `what` names the graph in the error, `names` its nodes.
/// Not for the replay path.  Throws: CaptureError.
void check_graph_events(const std::vector<GraphNode>& nodes, const NodeNames& names, const ExternalEvent& done,
                        const std::vector<const ExternalEvent*>& ready, const std::string& what);

}  // namespace sidestream
