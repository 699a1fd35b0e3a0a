#pragma once

namespace sidestream {

/// While one lives, a `backward()` from inside a backward pass (a checkpoint of the user's own) throws CaptureError: it would
/// accumulate into leaves, which a capture must not do. It stands around the backwards that warm up and capture graphs.
/// Threads: any; the refusal holds for all threads, since backward runs on autograd's own.
class [[nodiscard]] NestedBackwardRefusal {
 public:
  NestedBackwardRefusal() noexcept;
  NestedBackwardRefusal(const NestedBackwardRefusal&) = delete;
  NestedBackwardRefusal& operator=(const NestedBackwardRefusal&) = delete;
  ~NestedBackwardRefusal();
};

}  // namespace sidestream
