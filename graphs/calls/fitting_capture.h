#pragma once
#include <memory>
#include <vector>

#include "graphs/sequence/graph_sequence.h"
#include "sidestream/graph_options.h"

namespace sidestream {

class EngineSequences;
struct EngineResources;

/// Captures a sequence that fits the device. Where memory runs out, or less is left than the rest of a step took (EagerMemoryEstimate), and the
/// options offload anything, it is planned and captured again with less of what leaves on the device, twice at most; nothing of it has
/// replayed by then. `memory`: see GraphResources. `sequences`: those before it; it marks their outputs again where a capture failed.
/// Throws: as make_graphed_callables; DeviceError that says by how much it does not fit. What is left for the rest may be less than
/// that took all the same: it is an estimate, and a note says so.
[[nodiscard]] std::shared_ptr<GraphSequence> capture_that_fits(EngineResources& resources, EngineSequences& sequences,
                                                               const std::vector<CallSpec>& specs,
                                                               const GraphOptions& options,
                                                               const std::shared_ptr<GraphMemory>& memory);

}  // namespace sidestream
