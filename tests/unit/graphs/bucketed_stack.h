#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/bucketed_callables.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/testing/simulator.h"

namespace sidestream {

/// Four layers that are captured for several lengths, beside their plain twin.
class BucketedStack : public testing::Test {
 protected:
  static constexpr std::int64_t kLayers = 4;  // so many that some leave

  ~BucketedStack() override { set_schedule(device_, Schedule()); }

  void capture(const BucketOptions& options = {}, const std::vector<std::int64_t>& lengths = {8, 32, 20}) {
    std::vector<Callable> callables;
    for (const torch::nn::AnyModule& layer : *model_) {
      callables.emplace_back("layers." + std::to_string(callables.size()), layer);
    }
    std::vector<std::vector<std::vector<Sample>>> samples;
    for (const std::int64_t length : lengths) {
      std::vector<std::vector<Sample>>& bucket = samples.emplace_back();
      bucket.push_back({data(0, length).requires_grad_(true)});
      while (bucket.size() < callables.size()) {
        bucket.push_back({Sample::output_of(static_cast<std::int64_t>(bucket.size()) - 1)});
      }
    }
    layers_ = make_bucketed_callables(engine_, callables, samples, options);
  }
  /// Of at most 48 rows.
  [[nodiscard]] at::Tensor data(std::int64_t s, std::int64_t length, std::int64_t salt = 0) const {
    using testing_model::rows;
    return at::cat({rows(s, device_, salt), rows(s, device_, salt + 7), rows(s, device_, salt + 8)})
        .narrow(0, 0, length)
        .clone();
  }
  at::Tensor forward(bool graphs, at::Tensor h) {
    if (!graphs) {
      return plain_->forward(h);
    }
    for (const GraphedCallable& layer : layers_) {
      h = layer({h})[0];
    }
    return h;
  }
  /// `run` gives the same in a step of the graphed layers and of their plain twin, without a step of the engine.
  void expect_plain(std::int64_t s, const std::function<testing_model::StepTensors(bool graphs)>& run) {
    const auto step = [&](torch::nn::Sequential& trained, bool graphs) {
      testing_model::StepTensors given;
      testing_model::StepTensors result = testing_model::train_step(*trained, nullptr, [&] { given = run(graphs); });
      result.insert(result.end(), given.begin(), given.end());
      return result;
    };
    const testing_model::StepTensors plain = step(plain_, false);
    EXPECT_TRUE(testing_model::same(step(model_, true), plain)) << "step " << s;
  }
  /// With inputs of `length` rows.
  void expect_plain(std::int64_t s, std::int64_t length) {
    expect_plain(s, [&](bool graphs) {
      const at::Tensor x = data(s, length).requires_grad_(true);
      (forward(graphs, x) * data(s, length, 1)).mean().backward();
      return testing_model::StepTensors{{"gradient of the input", x.grad()}};
    });
  }

  c10::Device device_ = find_device("sim");
  torch::nn::Sequential model_ = testing_model::layer_stack(kLayers, device_);
  torch::nn::Sequential plain_ = testing_model::layer_stack(kLayers, device_);
  OffloadEngine engine_{*model_, Options(device_).offload("layers.*.*").min_bytes(1024)};
  std::vector<GraphedCallable> layers_;
};

}  // namespace sidestream
