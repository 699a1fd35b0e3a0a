#include "model_of_real_parts.h"

#include <ATen/ATen.h>

namespace sidestream::test {

GroupedAttentionImpl::GroupedAttentionImpl(const ModelShape& shape)
    : heads_(shape.heads),
      key_heads_(shape.key_heads),
      width_(shape.hidden / shape.heads),
      query_(register_module("query", torch::nn::Linear(shape.hidden, shape.hidden))),
      key_value_(register_module("key_value", torch::nn::Linear(shape.hidden, 2 * key_heads_ * width_))),
      output_(register_module("output", torch::nn::Linear(shape.hidden, shape.hidden))) {}

at::Tensor GroupedAttentionImpl::forward(const at::Tensor& x) {
  const std::int64_t batch = x.size(0), length = x.size(1);
  const at::Tensor query = query_(x).view({batch, length, heads_, width_}).transpose(1, 2);
  const at::Tensor key_value = key_value_(x).view({batch, length, 2, key_heads_, width_}).permute({2, 0, 3, 1, 4});
  const at::Tensor mixed =
      at::scaled_dot_product_attention(query, key_value[0], key_value[1], {}, 0.0, true, std::nullopt, true);
  return output_(mixed.transpose(1, 2).reshape({batch, length, heads_ * width_}));
}

ExpertsImpl::ExpertsImpl(const ModelShape& shape)
    : chosen_(shape.chosen_experts),
      router_(register_module("router",
                              torch::nn::Linear(torch::nn::LinearOptions(shape.hidden, shape.experts).bias(false)))),
      up_(register_module("up", torch::nn::ModuleList())),
      down_(register_module("down", torch::nn::ModuleList())) {
  for (std::int64_t expert = 0; expert < shape.experts; ++expert) {
    up_->push_back(torch::nn::Linear(shape.hidden, 2 * shape.hidden));
    down_->push_back(torch::nn::Linear(2 * shape.hidden, shape.hidden));
  }
}

at::Tensor ExpertsImpl::forward(const at::Tensor& x) {
  const at::Tensor rows = x.reshape({-1, x.size(-1)});
  const auto [weights, choices] = at::topk(at::softmax(router_(rows).to(at::kFloat), -1), chosen_, -1);
  at::Tensor sum = at::zeros_like(rows);
  for (std::size_t expert = 0; expert < up_->size(); ++expert) {
    const std::vector<at::Tensor> where = at::where(choices == static_cast<std::int64_t>(expert));
    const at::Tensor inside =
        at::gelu(up_->ptr<torch::nn::LinearImpl>(expert)->forward(at::index_select(rows, 0, where[0])));
    const at::Tensor routed = down_->ptr<torch::nn::LinearImpl>(expert)->forward(inside);
    sum = at::index_add(sum, 0, where[0],
                        (routed * at::index(weights, {where[0], where[1]}).unsqueeze(1)).to(sum.dtype()));
  }
  return sum.view_as(x);
}

BlockImpl::BlockImpl(const ModelShape& shape)
    : attention_norm_(register_parameter("attention_norm", at::ones({shape.hidden}))),
      attention_(register_module("attention", GroupedAttention(shape))),
      experts_norm_(register_module("experts_norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({shape.hidden})))),
      experts_(register_module("experts", Experts(shape))),
      dropout_(register_module("dropout", torch::nn::Dropout(shape.dropout))) {}

at::Tensor BlockImpl::forward(const at::Tensor& x) {
  const at::Tensor attended = x + dropout_(attention_(at::rms_norm(x, {x.size(-1)}, attention_norm_, 1e-6)));
  return attended + dropout_(experts_(experts_norm_(attended)));
}

ModelImpl::ModelImpl(const ModelShape& shape)
    : embedding_(register_module("embedding", torch::nn::Embedding(shape.vocabulary, shape.hidden))),
      blocks_(register_module("blocks", torch::nn::ModuleList())),
      norm_(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({shape.hidden})))),
      head_(register_module("head", torch::nn::Linear(shape.hidden, shape.vocabulary))) {
  for (std::int64_t layer = 0; layer < shape.layers; ++layer) {
    blocks_->push_back(Block(shape));
  }
}

at::Tensor ModelImpl::forward(const at::Tensor& tokens) {
  at::Tensor x = embedding_(tokens);
  for (std::size_t i = 0; i < blocks_->size(); ++i) {
    x = block(i).forward(x);
  }
  return head_(norm_(x));
}

}  // namespace sidestream::test
