#pragma once
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace sidestream {

/// Takes `.grad` off leaves for its lifetime: what is there at the end of it was put there meanwhile.
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

  /// One more, from here on.
  void hide(const at::Tensor& leaf) {
    if (leaf.grad().defined()) {
      gradients_.emplace_back(leaf, leaf.grad());
      leaf.mutable_grad() = at::Tensor();
    }
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_;
};

}  // namespace sidestream
