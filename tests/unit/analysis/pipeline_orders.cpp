#include "tests/unit/analysis/pipeline_orders.h"

#include <algorithm>
#include <utility>
#include <vector>

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

SequenceOrder interleaved(std::size_t ranks, std::size_t chunks, std::size_t microbatches) {
  // `ranks` microbatches go through one chunk before the next chunk begins.
  const auto forward = [&](std::size_t i) {
    const std::size_t group = ranks * chunks;
    return SequenceStep{i % group / ranks, i / group * ranks + i % ranks, Direction::forward};
  };
  const auto backward = [&](std::size_t i) {
    SequenceStep step = forward(i);
    return SequenceStep{chunks - 1 - step.call, step.microbatch, Direction::backward};
  };
  const std::size_t all = chunks * microbatches;
  const std::size_t warm_up = std::min(all, 2 * (ranks - 1) + (chunks - 1) * ranks);
  std::vector<SequenceStep> steps;
  for (std::size_t i = 0; i < all + warm_up; ++i) {
    if (i < all) {
      steps.push_back(forward(i));
    }
    if (i >= warm_up) {
      steps.push_back(backward(i - warm_up));
    }
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
