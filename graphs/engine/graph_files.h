#pragma once
#include <string>
#include <vector>

#include "graphs/calls/engine_sequences.h"
#include "runtime/runtime.h"

namespace sidestream {

/// Draws each captured graph of `sequences` into a file of its own in `folder`, which is made where it is missing. Returns the files.
/// Each is there whole, or as it was. Throws: UsageError where one cannot be written, also where there is no graph yet.
std::vector<std::string> write_graph_files(const Runtime& runtime, const EngineSequences& sequences,
                                           const std::string& folder);

}  // namespace sidestream
