#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>

#include "sim/torch/fused_kernels.h"
#include "sim/torch/operators.h"

namespace sidestream::sim {
namespace {

// (input, weight, bias?, stride, padding, dilation, transposed, output_padding, groups) -> output
void forward(const c10::OperatorHandle& /*op*/, torch::jit::Stack& stack) {
  at::Tensor output = at::convolution(stack[0].toTensor(), stack[1].toTensor(), stack[2].toOptional<at::Tensor>(),
                                      stack[3].toDimVector(), stack[4].toDimVector(), stack[5].toDimVector(),
                                      stack[6].toBool(), stack[7].toDimVector(), stack[8].toInt());
  stack = {std::move(output)};
}

// (grad_output, input, weight, stride, padding, dilation, transposed, output_padding, groups, output_mask) ->
// (grad_input, grad_weight, grad_bias)
void backward(const c10::OperatorHandle& /*op*/, torch::jit::Stack& stack) {
  const at::Tensor weight = stack[2].toTensor();
  const bool transposed = stack[6].toBool();
  const std::int64_t groups = stack[8].toInt();
  const std::int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  const c10::List<bool> wanted = stack[9].toBoolList();
  auto [input_grad, weight_grad, bias_grad] =
      at::convolution_backward(stack[0].toTensor(), stack[1].toTensor(), weight, c10::IntArrayRef(channels),
                               stack[3].toDimVector(), stack[4].toDimVector(), stack[5].toDimVector(), transposed,
                               stack[7].toDimVector(), groups, {wanted[0], wanted[1], wanted[2]});
  stack = {std::move(input_grad), std::move(weight_grad), std::move(bias_grad)};
}

}  // namespace

void register_convolution(torch::Library& aten) {
  aten.impl("convolution_overrideable", boxed_kernel<&forward>());
  aten.impl("convolution_backward_overrideable", boxed_kernel<&backward>());
}

}  // namespace sidestream::sim
