#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>

#include "operator_cases.h"

namespace {

using sidestream::test::gradients;
using sidestream::test::indices;
using sidestream::test::OperatorCase;
using sidestream::test::parameter;
using sidestream::test::values;
using Tensors = std::vector<at::Tensor>;
using D = c10::Device;

Tensors attention(D d, std::int64_t key_heads, double dropout, bool causal, at::ScalarType dtype = at::kFloat) {
  auto q = parameter({2, 4, 16, 8}, d, dtype), k = parameter({2, key_heads, 16, 8}, d, dtype),
       v = parameter({2, key_heads, 16, 8}, d, dtype);
  at::manual_seed(9);
  return gradients(at::scaled_dot_product_attention(q, k, v, {}, dropout, causal, std::nullopt, key_heads != 4),
                   {q, k, v});
}

Tensors batch_norm(D d) {
  auto x = parameter({2, 3, 8, 8}, d), w = parameter({3}, d), b = parameter({3}, d);
  auto mean = at::zeros({3}).to(d), var = at::ones({3}).to(d);
  Tensors results = gradients(at::batch_norm(x, w, b, mean, var, true, 0.1, 1e-5, false), {x, w, b});
  results.push_back(mean);
  results.push_back(var);
  return results;
}

std::vector<OperatorCase> layer_cases() {
  return {
      {"RmsNorm",
       [](D d) {
         auto x = parameter({4, 8}, d), w = parameter({8}, d);
         return gradients(at::rms_norm(x, {8}, w, 1e-6), {x, w});
       }},
      {"LayerNorm",
       [](D d) {
         auto x = parameter({4, 8}, d), w = parameter({8}, d), b = parameter({8}, d);
         return gradients(at::layer_norm(x, {8}, w, b), {x, w, b});
       }},
      {"GroupNorm",
       [](D d) {
         auto x = parameter({2, 4, 6}, d), w = parameter({4}, d), b = parameter({4}, d);
         return gradients(at::group_norm(x, 2, w, b), {x, w, b});
       }},
      {"BatchNorm", batch_norm},
      {"Convolution",
       [](D d) {
         auto x = parameter({2, 3, 8, 8}, d), w = parameter({4, 3, 3, 3}, d), b = parameter({4}, d);
         return gradients(at::conv2d(x, w, b, 1, 1), {x, w, b});
       }},
      {"AttentionCausal", [](D d) { return attention(d, 4, 0.0, true); }},
      {"AttentionFull", [](D d) { return attention(d, 4, 0.0, false); }},
      {"AttentionGroupedQuery", [](D d) { return attention(d, 2, 0.0, true); }},
      {"AttentionBFloat16", [](D d) { return attention(d, 4, 0.0, true, at::kBFloat16); }},
      {"AttentionGroupedQueryBFloat16", [](D d) { return attention(d, 2, 0.0, true, at::kBFloat16); }},
      {"AttentionDropout", [](D d) { return attention(d, 4, 0.3, false); }},
      {"AttentionMask",
       [](D d) {
         auto q = parameter({2, 4, 16, 8}, d);
         auto mask = at::ones({16, 16}).tril().to(at::kBool).to(d);
         return gradients(at::scaled_dot_product_attention(q, q, q, mask), {q});
       }},
      {"AttentionLearnedBias",
       [](D d) {
         auto q = parameter({2, 4, 16, 8}, d), bias = parameter({16, 16}, d);
         return gradients(at::scaled_dot_product_attention(q, q, q, bias), {q, bias});
       }},
      {"AttentionThenProjection",
       [](D d) {
         auto q = parameter({2, 4, 16, 8}, d), w = parameter({32, 32}, d);
         auto y = at::scaled_dot_product_attention(q, q, q, {}, 0.0, true).transpose(1, 2).reshape({2, 16, 32});
         return gradients(at::linear(y, w), {q, w});
       }},
      {"AttentionTwiceDifferentiated",
       [](D d) {
         auto q = parameter({1, 2, 8, 4}, d);
         auto y = at::scaled_dot_product_attention(q * 2, q, q).sum();
         return torch::autograd::grad({y}, {q});
       }},
      {"Embedding",
       [](D d) {
         auto w = parameter({32, 8}, d);
         return gradients(at::embedding(w, indices(10, 5, d)), {w});
       }},
      {"CrossEntropy",
       [](D d) {
         auto x = parameter({10, 32}, d);
         return gradients(at::cross_entropy_loss(x, indices(10, 32, d)), {x});
       }},
      {"CrossEntropySmoothedWithIgnoredTarget",
       [](D d) {
         auto x = parameter({10, 32}, d);
         auto target = at::arange(10);
         target[3] = -100;
         return gradients(at::cross_entropy_loss(x, target.to(d), {}, at::Reduction::Mean, -100, 0.1), {x});
       }},
      {"SoftmaxBFloat16ToFloat",
       [](D d) {
         auto x = parameter({8, 16}, d, at::kBFloat16);
         return gradients(at::softmax(x, -1, at::kFloat), {x});
       }},
      {"MeanSquaredError",
       [](D d) {
         auto x = parameter({8, 4}, d);
         return gradients(at::mse_loss(x, values({8, 4}, d)), {x});
       }},
  };
}

SIDESTREAM_OPERATOR_SUITE(OperatorLayers, layer_cases());

TEST(Attention, SavesItsOutputOnceForItselfAndTheProjection) {
  auto q = parameter({1, 2, 8, 4}, sidestream::test::sim());
  auto y = at::scaled_dot_product_attention(q, q, q, {}, 0.0, true);
  EXPECT_EQ(y.grad_fn()->name(), "ScaledDotProductFusedAttentionOverrideableBackward0");
}

TEST(Autocast, RunsMatmulInLowerPrecisionAndNormInFloat) {
  const c10::Device device = sidestream::test::sim();
  auto x = parameter({4, 4}, device), w = parameter({4, 4}, device);
  at::autocast::set_autocast_dtype(device.type(), at::kBFloat16);
  at::autocast::set_autocast_enabled(device.type(), true);
  auto product = at::matmul(x, w);
  auto softmax = at::softmax(product, -1);
  at::autocast::set_autocast_enabled(device.type(), false);
  at::autocast::clear_cache();
  EXPECT_EQ(product.scalar_type(), at::kBFloat16);
  EXPECT_EQ(softmax.scalar_type(), at::kFloat);
  const Tensors grads = torch::autograd::grad({softmax.square().sum()}, {x, w});
  EXPECT_EQ(grads[1].scalar_type(), at::kFloat);
}

}  // namespace
