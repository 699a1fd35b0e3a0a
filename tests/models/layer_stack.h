#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>

#include "sidestream/graphed_callable.h"
#include "sidestream/options.h"

namespace sidestream::testing_model {

/// One tensor in, one out, with offload scopes; batch norm with running statistics and dropout where asked for.
class Mlp : public torch::nn::Module {
 public:
  struct Extras {
    double dropout = 0.0;
    bool batch_norm = false;
    bool marked_activation = false;  ///< what the activation reads is marked with mark_not_offload
  };
  Mlp(std::int64_t hidden, const Extras& extras);
  at::Tensor forward(at::Tensor h);

 private:
  Extras extras_;
  at::Tensor norm_, fc1_, fc2_, mean_, variance_, scale_, shift_;
};

constexpr std::int64_t kHidden = 32;

/// `layers` Mlps in a Sequential on `device`, the same weights each time.
[[nodiscard]] torch::nn::Sequential layer_stack(std::int64_t layers, c10::Device device,
                                                const Mlp::Extras& extras = {});
/// Data of step `step`, [16, kHidden], the same for the same step and salt.
[[nodiscard]] at::Tensor rows(std::int64_t step, c10::Device device, std::int64_t salt = 0);

/// The layers of a stack as callables "layers.0", ...; each takes the output of the one before, or a sample of its own where
/// `own(layer)` says so. The first always has its own.
[[nodiscard]] std::vector<GraphedCallable> graph_stack(OffloadEngine& engine, const torch::nn::Sequential& model,
                                                       c10::Device device, const GraphOptions& options,
                                                       const std::function<bool(std::int64_t layer)>& own);
/// All of one kind.
[[nodiscard]] std::vector<GraphedCallable> graph_stack(OffloadEngine& engine, const torch::nn::Sequential& model,
                                                       c10::Device device, const GraphOptions& options,
                                                       bool linked = true);
/// What a trainer runs in place of the Sequential.
at::Tensor run_stack(const std::vector<GraphedCallable>& layers, at::Tensor h);

}  // namespace sidestream::testing_model
