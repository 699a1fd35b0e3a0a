#pragma once
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace sidestream {

/// Takes `.grad` off leaves for its lifetime. A `.grad` that code finds there meanwhile was put there meanwhile.
class [[nodiscard]] HiddenGradients {
 public:
  explicit HiddenGradients(const std::vector<at::Tensor>& leaves) {
    for (const at::Tensor& leaf : leaves) {
      hide(leaf);
    }
  }
  HiddenGradients(const HiddenGradients&) = delete;
  HiddenGradients& operator=(const HiddenGradients&) = delete;
  ~HiddenGradients() {
    for (auto& [leaf, gradient] : gradients_) {
      leaf.mutable_grad() = gradient;
    }
  }

  /// One more leaf, from here on.
  void hide(const at::Tensor& leaf) {
    if (leaf.grad().defined()) {
      gradients_.emplace_back(leaf, leaf.grad());
      leaf.mutable_grad() = at::Tensor();
    }
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_;
};

/// Takes tensor hooks and gradient accumulators off leaves for its lifetime. autograd::grad would run the hooks: their work would be
/// captured, and then run twice. An accumulator that an eager step made would tie the capture to that step's stream.
/// With `hooks_only` the leaves keep their accumulators: a backward finds leaves that its forward has read by their accumulators.
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
