#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/sequential.h>

#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"

namespace sidestream::testing_model {

/// A stack of layers that are graphed callables, and its plain twin with the same weights. `graphed` chooses one of the two.
struct StackTwins {
  /// Runs layer `i` of the graphed stack.
  using Layer = std::function<at::Tensor(std::size_t i, const at::Tensor& h)>;

  /// The engine offloads the scopes of all layers. Nothing is captured yet.
  explicit StackTwins(c10::Device on, std::int64_t count = 4, const Mlp::Extras& extras = {});
  /// Captured with these options.
  StackTwins(c10::Device on, std::int64_t count, const GraphOptions& options) : StackTwins(on, count) {
    capture(options);
  }

  void capture(const GraphOptions& options = {}, bool linked = true);
  /// With an engine of these options in place of the one before.
  void capture(const Options& engine_options, const GraphOptions& options, bool linked = true);

  /// The input of step `s`, a leaf.
  [[nodiscard]] at::Tensor input(std::int64_t s) const;
  [[nodiscard]] at::Tensor run_layer(bool graphed, std::size_t i, const at::Tensor& h) const;
  [[nodiscard]] at::Tensor forward(bool graphed, at::Tensor h) const;
  /// The mean of all outputs for `x`, each with a weight of step `s`.
  [[nodiscard]] at::Tensor loss(bool graphed, const at::Tensor& x, std::int64_t s) const;

  /// A step of a trainer: gradients of parameters and input, buffers, and the output, which `output` gets too. `run`, if given,
  /// runs the graphed layers.
  StepTensors step(bool graphed, std::int64_t s, const Layer& run = {}, at::Tensor* output = nullptr);
  /// Step `s` of both stacks gives the same. Returns the output of the graphed one.
  at::Tensor expect_plain(std::int64_t s, const Layer& run = {});
  /// Steps [first, last).
  void expect_plain(std::int64_t first, std::int64_t last);

  c10::Device device;
  torch::nn::Sequential model, plain;
  std::optional<OffloadEngine> engine;  ///< of `model`
  std::vector<GraphedCallable> layers;  ///< of `model`
};

}  // namespace sidestream::testing_model
