#pragma once
#include <string>
#include <vector>

#include "runtime/runtime.h"

namespace sidestream {

class EngineSequences;

/// Draws each captured graph of `sequences` into a file of its own in `folder`. Makes the folder if it is missing. Returns the files. Each
/// file is written whole, or is as it was. Throws: UsageError if a file cannot be written, also if there is no graph yet.
std::vector<std::string> write_graph_files(const Runtime& runtime, const EngineSequences& sequences,
                                           const std::string& folder);

}  // namespace sidestream
