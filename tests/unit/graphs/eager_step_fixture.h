#pragma once
#include <cstdint>
#include <functional>
#include <string>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include "models/plain_twin.h"
#include "models/scopes.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/report.h"

namespace sidestream::testing_model {

using Loss = std::function<at::Tensor(const at::Tensor& x, const at::Tensor& weight)>;

/// One storage of [64, 64] floats.
inline constexpr std::int64_t kSquareBytes = 64 * 64 * 4;

class EagerStep : public testing::Test {
 protected:
  [[nodiscard]] Options options() const { return Options(device_).min_bytes(1024).groups_in_flight(1); }

  [[nodiscard]] at::Tensor data(std::int64_t s) const {
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(300 + s));
    return at::randn({64, 64}, generator).to(device_);
  }

  /// Gradients of the input and of the weight.
  StepTensors gradients(const Loss& loss, std::int64_t s, int backwards = 1) {
    weight_.mutable_grad() = at::Tensor();
    const at::Tensor x = data(s).requires_grad_(true);
    const at::Tensor value = loss(x, weight_);
    for (int i = 1; i < backwards; ++i) {
      value.backward({}, /*retain_graph=*/true);
    }
    value.backward();
    return {{"gradient of the input", x.grad()}, {"gradient of the weight", weight_.grad()}};
  }

  /// Four steps with `engine`, each compared with plain training.
  void expect_plain(OffloadEngine& engine, const Loss& loss, int backwards = 1) {
    const auto mine = [&](std::int64_t s) {
      const auto step = engine.step();
      return gradients(loss, s, backwards);
    };
    testing_model::expect_plain(0, 4, mine, [&](std::int64_t s) { return gradients(loss, s, backwards); });
  }

  [[nodiscard]] static const GroupReport* find(const Report& report, const std::string& name) {
    for (const GroupReport& group : report.groups) {
      if (group.name == name) {
        return &group;
      }
    }
    return nullptr;
  }

  c10::Device device_ = find_device("sim");
  torch::nn::Module model_;
  at::Tensor weight_ = model_.register_parameter("weight", data(99).mul(0.1));  // what is done with it is the test's
};

inline at::Tensor three_scopes(const at::Tensor& x, const at::Tensor& weight) {
  return through_scopes(x * weight, {"first", "second", "third"}).sum();
}

}  // namespace sidestream::testing_model
