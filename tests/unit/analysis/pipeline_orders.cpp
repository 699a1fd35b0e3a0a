#include "tests/unit/analysis/pipeline_orders.h"

#include <utility>
#include <vector>

#include "sidestream/pipeline_order.h"

namespace sidestream {
namespace {

void add_forwards(std::vector<SequenceStep>& steps, std::size_t calls, std::size_t microbatch) {
  for (std::size_t call = 0; call < calls; ++call) {
    steps.push_back({call, microbatch, Direction::forward});
  }
}

void add_backwards(std::vector<SequenceStep>& steps, std::size_t calls, std::size_t microbatch) {
  for (std::size_t call = calls; call-- > 0;) {
    steps.push_back({call, microbatch, Direction::backward});
  }
}

}  // namespace

SequenceOrder one_forward_one_backward(std::size_t calls, std::size_t warm_up, std::size_t microbatches) {
  std::vector<SequenceStep> steps;
  for (std::size_t i = 0; i < microbatches + warm_up; ++i) {
    if (i < microbatches) {
      add_forwards(steps, calls, i);
    }
    if (i >= warm_up) {
      add_backwards(steps, calls, i - warm_up);
    }
  }
  return SequenceOrder(std::move(steps));
}

SequenceOrder interleaved(std::int64_t ranks, std::int64_t stages, std::int64_t microbatches) {
  std::vector<SequenceStep> steps;
  for (const PipelineStep& step : pipeline_order({ranks, stages, microbatches}, 0)) {
    steps.push_back({static_cast<std::size_t>(step.stage), static_cast<std::size_t>(step.microbatch),
                     step.kind == PipelineStep::Kind::forward ? Direction::forward : Direction::backward});
  }
  return SequenceOrder(std::move(steps));
}

SequenceOrder forwards_first_in_order(std::size_t calls, std::size_t microbatches) {
  std::vector<SequenceStep> steps;
  for (std::size_t microbatch = 0; microbatch < microbatches; ++microbatch) {
    add_forwards(steps, calls, microbatch);
  }
  for (std::size_t microbatch = 0; microbatch < microbatches; ++microbatch) {
    add_backwards(steps, calls, microbatch);
  }
  return SequenceOrder(std::move(steps));
}

}  // namespace sidestream
