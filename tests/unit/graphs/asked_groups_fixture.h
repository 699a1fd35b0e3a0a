#pragma once
#include <cstdint>
#include <deque>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include "runtime/runtime.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/scope.h"

namespace sidestream::testing_model {

class AskedGroups : public testing::Test {
 protected:
  /// One storage of [64, 64] floats.
  static constexpr std::int64_t kSquareBytes = 64 * 64 * 4;

  [[nodiscard]] Options options() const { return Options(device_).min_bytes(1024).offload("**"); }
  [[nodiscard]] at::Tensor data(std::int64_t s) const {
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(300 + s));
    return at::randn({64, 64}, generator).to(device_).requires_grad_(true);
  }
  /// One group more, of two storages.
  static at::Tensor layer(const at::Tensor& h, const char* name, std::deque<OffloadScope>& handles,
                          bool later = false) {
    OffloadScope& scope = handles.emplace_back(name);
    at::Tensor result = h.exp().mul(0.5).tanh();
    later ? scope.end_later() : scope.end();
    return result;
  }
  static at::Tensor layers(at::Tensor h, std::deque<OffloadScope>& handles, bool later = false) {
    for (const char* name : {"a", "b", "c", "d"}) {
      h = layer(h, name, handles, later);
    }
    return h;
  }
  [[nodiscard]] std::int64_t allocated() const { return make_runtime(device_)->memory_stats().allocated; }
  /// A sizing step and one with the plan.
  template <class Loss>
  void two_steps(OffloadEngine& engine, const Loss& loss) {
    for (std::int64_t s = 0; s < 2; ++s) {
      const auto step = engine.step();
      loss(data(s)).backward();
    }
  }
  void two_steps(OffloadEngine& engine) {
    two_steps(engine, [](const at::Tensor& x) {
      std::deque<OffloadScope> handles;
      return layers(x.mul(2), handles).sum();
    });
  }

  c10::Device device_ = find_device("sim");
  torch::nn::Module model_;
};

}  // namespace sidestream::testing_model
