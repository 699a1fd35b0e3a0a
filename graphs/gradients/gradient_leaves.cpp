#include "graphs/gradients/gradient_leaves.h"

#include <algorithm>

namespace sidestream {

bool holds(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& t) { return t.is_same(tensor); });
}

std::vector<at::Tensor> requiring(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.requires_grad() && !holds(result, tensor)) {
      result.push_back(tensor);
    }
  }
  return result;
}

}  // namespace sidestream
