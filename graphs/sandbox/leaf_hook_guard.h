#pragma once
#include <vector>

#include <ATen/core/Tensor.h>

namespace sidestream {

/// Takes tensor hooks and gradient accumulators off leaves for its lifetime: autograd::grad would run the hooks (their work
/// would be captured and then run twice), and an accumulator that an eager step made ties the capture to that step's stream.
/// Leaves that a forward has read keep their accumulators until its backward, which finds them by these (`hooks_only`).
class [[nodiscard]] LeafHookGuard {
 public:
  explicit LeafHookGuard(const std::vector<at::Tensor>& leaves, bool hooks_only = false);
  LeafHookGuard(const LeafHookGuard&) = delete;
  LeafHookGuard& operator=(const LeafHookGuard&) = delete;
  ~LeafHookGuard();

 private:
  struct Saved;
  std::vector<Saved> saved_;
  bool hooks_only_;
};

}  // namespace sidestream
