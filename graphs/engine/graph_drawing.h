#pragma once
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "graphs/sequence/captured_call.h"
#include "runtime/runtime.h"

namespace sidestream {

class EngineSequences;

/// What a drawing tells of a graph beside its nodes.
struct DrawnGraph {
  const CapturedCall& call;
  bool backward = false;
  std::string stream;  ///< in words: which one launches it
};

/// One captured graph in Graphviz's language `dot`: its nodes by branch, named by operator and scope, its events, the copies that
/// replays queue beside it, and the bytes of what it reads and writes. Not for the replay path.  Throws: as Runtime::nodes.
[[nodiscard]] std::string draw_graph(const Runtime& runtime, const DrawnGraph& drawn);

/// Which branch each node is on: a node goes on with the branch of the first of its predecessors that nobody has gone on with, or
/// begins one.
[[nodiscard]] std::vector<std::size_t> branches_of(const std::vector<GraphNode>& nodes);

/// Draws each captured graph of `sequences` into a file of its own in `folder`, which is made where it is missing. Returns the files.
/// Each is there whole, or as it was. Throws: UsageError where one cannot be written, also where there is no graph yet.
std::vector<std::string> write_graph_files(const Runtime& runtime, const EngineSequences& sequences,
                                           const std::string& folder);

}  // namespace sidestream
