#include "graphs/gradients/given_gradients.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <c10/util/irange.h>

#include "graphs/outputs/end_of_backward.h"
#include "graphs/outputs/storage_holders.h"
#include "memory/storage_view.h"
#include "offload/saved_tensor_recorder.h"

namespace sidestream {
namespace {

/// True if `grad` has all of its storage and no other tensor can use a part of it. False for a seed that is handed on, for the one
/// gradient of a sum's two terms, and for an expanded number.
bool has_own_memory(const at::Tensor& grad) {
  return !others_hold(grad, 1) && grad.has_storage() && !others_hold(grad.storage(), 1) &&
         grad.is_non_overlapping_and_dense() && grad.nbytes() == grad.storage().nbytes();
}

}  // namespace

void give_memory(CallParameter& parameter) {
  if (!StorageView::supported(parameter.grad)) {
    return;  // sparse: is cloned
  }
  if (!has_own_memory(parameter.grad)) {
    const at::NoGradGuard no_grad;
    parameter.grad = parameter.grad.clone();
  }
  parameter.memory.emplace(parameter.grad.storage());
  parameter.view = StorageView::capture(parameter.grad);
}

bool give_input_gradients(std::vector<StaticInput>& inputs, const std::vector<at::Tensor>& grads) {
  const auto first = std::find_if(grads.begin(), grads.end(), [](const at::Tensor& grad) { return grad.defined(); });
  if (first == grads.end()) {
    return false;
  }
  bool any = false;
  const RecorderGuard no_recorder(nullptr);
  await_end_of_backward(first->device());
  for (const auto i : c10::irange(grads.size())) {
    StaticInput& input = inputs[i];
    if (StorageView::supported(grads[i]) && has_own_memory(grads[i])) {
      input.memory.emplace(grads[i].storage());
      input.view = StorageView::capture(grads[i]);
      any = true;
    }
  }
  return any;
}

}  // namespace sidestream
