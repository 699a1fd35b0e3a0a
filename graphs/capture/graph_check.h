#pragma once
#include <string>

#include "runtime/runtime.h"

namespace sidestream {

/// Checks a captured graph (rule: an event that a graph does not record is a silent no-op): exactly one record of `done` and
/// one of `copies_done`; `done` descends from every compute node, that is from all but the copies between host and device, and
/// `copies_done` from all other nodes. `what` names the graph in the error.
/// Not for the replay path.  Throws: CaptureError.
void check_graph_events(const Runtime& runtime, const Graph& graph, const ExternalEvent& done,
                        const ExternalEvent& copies_done, const std::string& what);

}  // namespace sidestream
