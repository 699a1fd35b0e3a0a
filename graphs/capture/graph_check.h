#pragma once
#include <string>
#include <vector>

#include "runtime/runtime.h"

namespace sidestream {

/// Checks a captured graph (rule: an event that a graph does not record is a silent no-op): exactly one record of `done` and of
/// each event of `ready`; `done` descends from every node that does anything. `what` names the graph in the error.
/// Not for the replay path.  Throws: CaptureError.
void check_graph_events(const Runtime& runtime, const Graph& graph, const ExternalEvent& done,
                        const std::vector<const ExternalEvent*>& ready, const std::string& what);

}  // namespace sidestream
