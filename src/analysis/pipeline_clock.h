#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include "sidestream/pipeline_order.h"

namespace sidestream {

/// Runs `step` of `rank`, whose input is there at the time `arrived`; 0 if it needs none. Returns the time at which the step ends.
using RunStep = std::function<double(std::int64_t rank, const PipelineStep& step, double arrived)>;

/// True if some weight gradients are steps of their own.
[[nodiscard]] bool delays_weight_gradients(const std::vector<std::vector<PipelineStep>>& orders);

/// Calls `run` once for each step of the orders: for a rank in its order, and for each step after the one that it waits for. What a step
/// computes for another virtual stage arrives there `send_seconds` after the step's end.
/// Throws: as pipeline_times.
void run_pipeline(const std::vector<std::vector<PipelineStep>>& orders, double send_seconds, const RunStep& run);

}  // namespace sidestream
