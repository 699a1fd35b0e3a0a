#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>

#include "sim/torch/aliases.h"
#include "sim/torch/fused_kernels.h"
#include "sim/torch/issued_kernel.h"
#include "sim/torch/operators.h"

namespace sidestream::sim {
namespace {

/// The CPU's choice, with its flash kernel under the name that other devices register theirs by.
std::int64_t choose(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                    const std::optional<at::Tensor>& mask, double dropout, bool causal, std::optional<double> scale,
                    bool enable_gqa) {
  Aliases aliases;
  const auto alias = [&](const at::Tensor& tensor) {
    at::Tensor result = aliases.of(tensor);
    // Whether an input needs a gradient is part of the choice.
    result.set_requires_grad(tensor.requires_grad() && result.is_floating_point());
    return result;
  };
  std::optional<at::Tensor> mask_alias;
  if (mask && mask->defined()) {
    mask_alias = alias(*mask);
  }
  const auto backend = static_cast<sdp::SDPBackend>(
      at::_fused_sdp_choice(alias(query), alias(key), alias(value), mask_alias, dropout, causal, scale, enable_gqa));
  return static_cast<std::int64_t>(backend == sdp::SDPBackend::flash_attention ? sdp::SDPBackend::overrideable
                                                                               : sdp::SDPBackend::math);
}

// (query, key, value, attn_bias?, dropout_p, is_causal, return_debug_mask, scale?) ->
// (output, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, philox_seed, philox_offset, debug_attn_mask)
void flash_forward(const c10::OperatorHandle& /*op*/, torch::jit::Stack& stack) {
  const at::Tensor query = stack[0].toTensor();
  const at::Tensor key = stack[1].toTensor();
  auto [output, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      query, key, stack[2].toTensor(), stack[4].toDouble(), stack[5].toBool(), stack[3].toOptional<at::Tensor>(),
      stack[7].toOptional<double>());
  const at::Tensor none = at::empty({0}, at::kLong);
  stack = {std::move(output), std::move(logsumexp), none, none, query.size(2), key.size(2), none, none, none};
}

// (grad_out, query, key, value, attn_bias, grad_input_mask, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
// is_causal, philox_seed, philox_offset, scale?) -> (grad_query, grad_key, grad_value, grad_attn_bias)
void flash_backward(const c10::OperatorHandle& /*op*/, torch::jit::Stack& stack) {
  std::optional<at::Tensor> mask = stack[4].toOptional<at::Tensor>();
  if (mask && !mask->defined()) {
    mask.reset();
  }
  auto [query, key, value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor(), stack[3].toTensor(), stack[6].toTensor(),
      stack[7].toTensor(), stack[12].toDouble(), stack[13].toBool(), mask, stack[16].toOptional<double>());
  stack = {std::move(query), std::move(key), std::move(value), at::Tensor()};
}

}  // namespace

void register_attention(torch::Library& aten) {
  static at::native::RegisterPRIVATEUSE1Dispatch<at::native::_fused_sdp_choice_stub_DECLARE_DISPATCH_type> stub(
      at::native::_fused_sdp_choice_stub, &choose);
  aten.impl("_fused_sdp_choice", &choose);
  aten.impl("_scaled_dot_product_fused_attention_overrideable", boxed_kernel<&flash_forward>());
  aten.impl("_scaled_dot_product_fused_attention_overrideable_backward", boxed_kernel<&flash_backward>());
}

}  // namespace sidestream::sim
