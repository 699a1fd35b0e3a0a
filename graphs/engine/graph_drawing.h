#pragma once
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "graphs/sequence/captured_call.h"
#include "runtime/runtime.h"

namespace sidestream {

class EngineSequences;

/// Everything that a drawing shows of a graph, except its nodes.
struct DrawnGraph {
  const CapturedCall& call;
  bool backward = false;
  std::string stream;  ///< in words: which one launches it
};

/// One captured graph in Graphviz's language `dot`: its nodes by branch, named by operator and scope, its events, the copies that
/// replays queue beside it, and the bytes of what it reads and writes. Not for the replay path.  Throws: as Runtime::nodes.
[[nodiscard]] std::string draw_graph(const Runtime& runtime, const DrawnGraph& drawn);

/// Which branch each node is on. A node continues the branch of its first predecessor whose branch no earlier node continues; else it
/// begins a branch.
[[nodiscard]] std::vector<std::size_t> branches_of(const std::vector<GraphNode>& nodes);

/// Draws each captured graph of `sequences` into a file of its own in `folder`. Makes the folder if it is missing. Returns the files. Each
/// file is written whole, or is as it was. Throws: UsageError if a file cannot be written, also if there is no graph yet.
std::vector<std::string> write_graph_files(const Runtime& runtime, const EngineSequences& sequences,
                                           const std::string& folder);

}  // namespace sidestream
