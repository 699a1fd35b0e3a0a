#pragma once
#include <vector>

#include <ATen/core/Tensor.h>

#include "graphs/gradients/owned_gradients.h"

namespace sidestream {

/// Inside the capture of the backward: an owned parameter's gradient keeps the memory that the graph writes, as long as the graph lives.
void give_memory(CallParameter& parameter);

/// After the capture of the last backward in memory of the sequence's own: no later graph could use the memory of `grads`, the gradients
/// of its `inputs`, which only the caller and autograd own. Gradients with storages of their own may be given out without a copy; a clone
/// would take the same bytes again. Returns true if there is such a gradient.
[[nodiscard]] bool give_input_gradients(std::vector<StaticInput>& inputs, const std::vector<at::Tensor>& grads);

}  // namespace sidestream
