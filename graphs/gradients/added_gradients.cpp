#include "graphs/gradients/added_gradients.h"

#include <memory>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace sidestream {
namespace {

/// Autograd gives a leaf's hooks the sum of what reached it, on the stream that it would accumulate on.
class Adder final : public torch::autograd::FunctionPreHook {
 public:
  Adder(at::Tensor target, char& added) : target_(std::move(target)), added_(&added) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    if (!grads[0].defined()) {
      return grads;
    }
    const at::NoGradGuard no_grad;
    target_.add_(grads[0]);
    *added_ = 1;
    return {at::Tensor()};
  }

 private:
  at::Tensor target_;
  char* added_;
};

}  // namespace

AddedGradients::AddedGradients(std::vector<at::Tensor> leaves, const std::vector<at::Tensor>& targets)
    : leaves_(std::move(leaves)), added_(leaves_.size()) {
  for (const auto i : c10::irange(leaves_.size())) {
    torch::autograd::impl::add_hook(leaves_[i], std::make_unique<Adder>(targets[i], added_[i]));
  }
}

AddedGradients::~AddedGradients() {
  for (const at::Tensor& leaf : leaves_) {
    torch::autograd::impl::clear_hooks(leaf);
  }
}

}  // namespace sidestream
