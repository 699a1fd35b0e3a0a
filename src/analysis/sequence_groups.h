#pragma once
#include <cstddef>
#include <utility>
#include <vector>

#include "analysis/sequence_order.h"

namespace sidestream {

/// The record of one step about calls that will be captured. Calls are numbered in the order of their first forwards. Plain data.
struct RecordedOrder {
  /// What ran, in that order; `microbatch` counts the runs of a call. Only the forward of a run is never missing.
  std::vector<SequenceStep> steps;
  /// Pairs of calls that autograd connects: one was computed from the other, or one backward pass ran through both.
  std::vector<std::pair<std::size_t, std::size_t>> connected;
  /// Calls that no backward can reach: none of their outputs needs a gradient.
  std::vector<std::size_t> forward_only = {};
};

/// Which of the calls 0 to `calls` - 1 are captured together, as a sequence in nested order: lists of calls in increasing order. Calls are
/// together if autograd connects them and if their sequence may replay in the recorded order; else the later call begins another
/// sequence. A call of `forward_only` joins the sequence of the call before it; those before the first other call join that one. Pure.
[[nodiscard]] std::vector<std::vector<std::size_t>> sequence_groups(std::size_t calls, const RecordedOrder& recorded);

/// The recorded calls as one sequence, in the order in which each of them ran first. Each of these runs has a backward. Pure.
[[nodiscard]] SequenceOrder sequence_in_order(const RecordedOrder& recorded);

}  // namespace sidestream
