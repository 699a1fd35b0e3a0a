#pragma once
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "analysis/sequence_groups.h"

namespace sidestream {

/// Writes down in which order recorded calls run forward and backward, and which of them autograd connects.
/// Threads: any.
class OrderLog {
 public:
  /// A forward of `call` begins; it was computed from the calls `from`. Returns what `backward` is to be given.
  SequenceStep forward(std::size_t call, const std::vector<std::size_t>& from);
  /// That forward ran. `forward_only`: none of its outputs needs a gradient.
  void ran(std::size_t call, bool forward_only);
  /// That forward threw: it is as if it had not begun.
  void forget(const SequenceStep& backward);
  /// The backward of a call begins, on the thread that runs it.
  void backward(const SequenceStep& step);
  /// The weight gradients of calls, which `backward` was told of as `backwards`, are computed, in the order in which these ran. Without a
  /// backward there are none.
  void weights(const std::vector<SequenceStep>& backwards);
  /// Of the calls in `among` (in increasing order), numbered as there: which are captured together. See sequence_groups.
  [[nodiscard]] std::vector<std::vector<std::size_t>> groups(const std::vector<std::size_t>& among) const;

  /// By call, of the calls 0 to `calls` - 1: whether its first run had a backward.
  [[nodiscard]] std::vector<bool> with_backward(std::size_t calls) const;
  /// By call, of the calls 0 to `calls` - 1: whether one of its runs had no backward.
  [[nodiscard]] std::vector<bool> without_backward(std::size_t calls) const;
  /// The order in which the calls in `among` ran, numbered as there. See sequence_in_order.
  [[nodiscard]] SequenceOrder order_of(const std::vector<std::size_t>& among) const;

 private:
  /// What was written about the calls in `among`, numbered as there.
  [[nodiscard]] RecordedOrder part_of(const std::vector<std::size_t>& among) const;

  mutable std::mutex mutex_;
  RecordedOrder order_;
  std::vector<std::size_t> runs_;                                // by call
  std::unordered_map<std::int64_t, std::size_t> first_in_pass_;  // by backward pass: the first call in it
};

}  // namespace sidestream
