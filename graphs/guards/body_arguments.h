#pragma once
#include <vector>

#include <ATen/core/Tensor.h>

#include "graphs/sequence/captured_call.h"

namespace sidestream {

/// What the body is given for the leaves that stand for its inputs: those themselves, or tensors of the same memory that are no
/// leaves, as the call was given.
[[nodiscard]] std::vector<at::Tensor> arguments_of(const CallSpec& spec, const std::vector<at::Tensor>& leaves);

}  // namespace sidestream
