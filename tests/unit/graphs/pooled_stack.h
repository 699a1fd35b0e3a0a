#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"

namespace sidestream::testing_model {

/// Graphed layers of a model of its own, and their plain twin.
struct PooledStack {
  PooledStack(c10::Device on, std::int64_t layers, const GraphOptions& options)
      : device(on), model(layer_stack(layers, on)), plain(layer_stack(layers, on)) {
    engine.emplace(*model, Options(on).offload("layers.*.*").min_bytes(1024));
    graphed = graph_stack(*engine, model, on, options);
  }
  at::Tensor forward(const at::Tensor& x) const { return run_stack(graphed, x); }
  /// A step on the data of `s`, which is plain training's; gives the output.
  at::Tensor expect_plain(std::int64_t s) {
    at::Tensor y;
    const auto step = [&](torch::nn::Sequential& trained, bool graphs) {
      const at::Tensor x = rows(s, device).requires_grad_(true);
      StepTensors result = train_step(*trained, nullptr, [&] {
        y = graphs ? forward(x) : trained->forward(x);
        (y * rows(s, device, 1)).sum().backward();
      });
      result.emplace_back("gradient of the input", x.grad());
      result.emplace_back("output", y);
      return result;
    };
    const StepTensors expected = step(plain, false);
    EXPECT_TRUE(same(step(model, true), expected)) << "step " << s;
    return y.detach();
  }

  c10::Device device;
  torch::nn::Sequential model;
  torch::nn::Sequential plain;
  std::optional<OffloadEngine> engine;
  std::vector<GraphedCallable> graphed;
};

}  // namespace sidestream::testing_model
