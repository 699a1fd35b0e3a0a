#pragma once
#include <cstdint>
#include <functional>
#include <string>

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include "graphs/engine/engine_access.h"
#include "models/plain_twin.h"
#include "models/stack_twins.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"

namespace sidestream::testing_model {

inline GraphOptions delayed(const std::string& pattern = "**") {
  return GraphOptions().gradients(pattern, GradientPolicy::delayed);
}

/// Two stacks of callables: one whose weight gradients backward_dw computes, and its plain twin.
class DelayedCallablesTest : public testing::Test {
 protected:
  /// A step of both stacks; `compute` runs after the backward of the graphed one.
  void expect_plain(std::int64_t s, const std::function<void()>& compute) {
    const auto step = [&](bool graphed) {
      torch::nn::Sequential& model = graphed ? stacks_.model : stacks_.plain;
      const at::Tensor x = stacks_.input(s);
      StepTensors all = train_step(*model, graphed ? &*stacks_.engine : nullptr, [&] {
        stacks_.loss(graphed, x, s).backward();
        if (graphed) {
          compute();
        }
      });
      all.emplace_back("gradient of the input", x.grad());
      return all;
    };
    const StepTensors plain = step(false);
    EXPECT_TRUE(same(step(true), plain)) << "step " << s;
  }
  void compute_all() { stacks_.engine->backward_dw(); }
  [[nodiscard]] const CapturedCalls& calls() const {
    const CapturedCalls* found = nullptr;
    EngineAccess::state(*stacks_.engine).sequences().for_each([&](const GraphSequence& sequence) {
      found = &sequence.captured().calls;
    });
    return *found;
  }

  c10::Device device_ = find_device("sim");
  StackTwins stacks_{device_};
};

}  // namespace sidestream::testing_model
