#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>

#include "sim/torch/fused_kernels.h"
#include "sim/torch/generator.h"
#include "sim/torch/operators.h"

namespace sidestream::sim {
namespace {

// On any device except the CPU, LibTorch uses the fused operator. The CPU's plain path draws a noise tensor of the input's dtype, divides
// it by 1 - p and multiplies. The kernels below do that arithmetic, with the noise stored as a mask.

/// (input, p, train?) -> (output, mask)
void forward(const c10::OperatorHandle& /*op*/, torch::jit::Stack& stack) {
  const at::Tensor input = stack[0].toTensor();
  const double p = stack[1].toDouble();
  const bool train = stack[2].isNone() || stack[2].toBool();
  if (!train || p == 0 || input.numel() == 0) {
    stack = {at::mul(input, 1), at::ones_like(input, at::kBool)};
  } else if (p == 1) {
    stack = {at::zeros_like(input), at::zeros_like(input, at::kBool)};
  } else {
    at::Tensor noise = at::empty_like(input);
    noise.bernoulli_(1 - p, DrawsFrom::drawing());
    at::Tensor mask = noise.to(at::kBool);
    stack = {at::mul(input, noise.div_(1 - p)), std::move(mask)};
  }
}

/// (grad_output, mask, scale) -> grad_input
void backward(const c10::OperatorHandle& /*op*/, torch::jit::Stack& stack) {
  const at::Tensor grad = stack[0].toTensor();
  const double scale = stack[2].toDouble();
  if (scale == 0) {
    stack = {at::zeros_like(grad)};
    return;
  }
  const at::Tensor noise = stack[1].toTensor().to(grad.scalar_type()).div_(1 / scale);
  stack = {at::mul(grad, noise)};
}

}  // namespace

void register_dropout(torch::Library& aten) {
  aten.impl("native_dropout", boxed_kernel<&forward>());
  aten.impl("native_dropout_backward", boxed_kernel<&backward>());
}

}  // namespace sidestream::sim
