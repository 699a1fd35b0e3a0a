#pragma once
#include <string>
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

/// One captured graph in Graphviz's language `dot`: its nodes, named by operator and scope, its events, and the copies that replays queue
/// beside it, with their bytes. Not for the replay path.  Throws: as Runtime::nodes.
[[nodiscard]] std::string draw_graph(const Runtime& runtime, const DrawnGraph& drawn);

/// Draws each captured graph of `sequences` into a file of its own in `folder`. Makes the folder if it is missing. Returns the files. Each
/// file is written whole, or is as it was. Throws: UsageError if a file cannot be written, also if there is no graph yet.
std::vector<std::string> write_graph_files(const Runtime& runtime, const EngineSequences& sequences,
                                           const std::string& folder);

}  // namespace sidestream
