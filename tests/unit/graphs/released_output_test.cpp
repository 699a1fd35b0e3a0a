// Outputs of a linked stack: they leave with what autograd saves, their memory goes back to the pool when no graph needs it any more,
// and whoever holds one has it all the same.
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "eventually.h"
#include "models/stack_twins.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/report.h"
#include "sim/device/device.h"
#include "unit/graphs/released_output_fixture.h"

namespace sidestream::testing_model {
namespace {

/// A linked stack, of which all that is saved leaves.
class StackTest : public ReleasedOutputTest, protected StackTwins {
 protected:
  StackTest() : StackTwins(find_device("sim"), kLayers) {}

  void capture(std::optional<std::size_t> lag = std::nullopt) {
    StackTwins::capture(lag ? options().lag(*lag) : options(), GraphOptions());
  }
  /// What `pass` gives, with all gradients, graphed and in plain training.
  void expect_plain(std::int64_t s, const std::function<StepTensors(bool graphed)>& pass) {
    const auto both = [&](torch::nn::Sequential& model, bool graphed) {
      StepTensors given;
      const StepTensors gradients = train_step(*model, graphed ? &*engine : nullptr, [&] { given = pass(graphed); });
      given.insert(given.end(), gradients.begin(), gradients.end());
      return given;
    };
    EXPECT_TRUE(same(both(model, true), both(plain, false))) << "step " << s;
  }
  /// Of the group "layers.<layer>.norm", which saves the layer's input.
  [[nodiscard]] std::int64_t norm_bytes(const OffloadEngine& engine, std::int64_t layer) const {
    for (const GroupReport& group : engine.report().groups) {
      if (group.name == "layers." + std::to_string(layer) + ".norm") {
        return group.offloaded_bytes;
      }
    }
    return -1;
  }
};

TEST_F(StackTest, LinkedInputsThatAreSavedLeaveWithTheirGroup) {
  capture();
  OffloadEngine other(*plain, options());
  const auto unlinked = graph_stack(other, plain, device, GraphOptions(), /*linked=*/false);
  EXPECT_EQ(norm_bytes(*engine, 0), norm_bytes(other, 0)) << "a sample is nobody's output";
  for (std::int64_t layer = 1; layer + 2 < kLayers; ++layer) {
    EXPECT_EQ(norm_bytes(*engine, layer), norm_bytes(other, layer) + kOutputBytes) << layer;
  }
}

TEST_F(StackTest, ASequenceKeepsNoOutputThatItsCallsHaveRead) {
  const auto keeps_at_most = [&](std::int64_t count, std::int64_t bound) {
    torch::nn::Sequential model = layer_stack(count, device);
    OffloadEngine engine(*model, options());
    synchronize(device);
    const std::int64_t before = memory_use(device).allocated;
    const auto layers = graph_stack(engine, model, device, GraphOptions());
    synchronize(device);
    return eventually([&] { return memory_use(device).allocated - before <= bound; });
  };
  // The first input and its gradient, the seed of the last output and that output: no layer takes it.
  EXPECT_TRUE(keeps_at_most(kLayers, 4 * kOutputBytes));
  EXPECT_TRUE(keeps_at_most(2 * kLayers, 4 * kOutputBytes));
}

TEST_F(StackTest, TrainsAsPlainTraining) {
  for (const std::optional<std::size_t> lag : {std::optional<std::size_t>(), std::optional<std::size_t>(0)}) {
    capture(lag);
    for (std::int64_t s = 0; s < 4; ++s) {
      expect_plain(s, [&](bool graphed) {
        const at::Tensor x = rows(s, device).requires_grad_(true);
        loss(graphed, x, s).backward();
        return StepTensors{{"x", x.grad()}};
      });
      EXPECT_EQ(engine->report().outputs_copied, 0);
    }
  }
}

TEST_F(StackTest, WhoKeepsAllOutputsHasThoseOfPlainTraining) {
  capture();
  for (std::int64_t s = 0; s < 3; ++s) {
    expect_plain(s, [&](bool graphed) {
      std::vector<at::Tensor> kept;
      at::Tensor h = rows(s, device).requires_grad_(true);
      StepTensors given;
      for (std::size_t i = 0; i < kLayers; ++i) {
        h = run_layer(graphed, i, h);
        kept.push_back(h);
        given.emplace_back("earliest, read meanwhile", kept.front());
      }
      for (const at::Tensor& output : kept) {
        given.emplace_back("before backward", output);
      }
      (h * rows(s, device, 1)).mean().backward();
      for (const at::Tensor& output : kept) {
        given.emplace_back("behind backward", output);
      }
      return given;
    });
    EXPECT_GE(engine->report().outputs_copied, kLayers - 1);
    EXPECT_GE(engine->report().outputs_copied_bytes, (kLayers - 1) * kOutputBytes);
  }
}

TEST_F(StackTest, AResidualSkipOutsideOfTheCalls) {
  capture();
  for (std::int64_t s = 0; s < 3; ++s) {
    expect_plain(s, [&](bool graphed) {
      const at::Tensor x = rows(s, device).requires_grad_(true);
      at::Tensor h = x;
      at::Tensor skips = x * 2;
      for (std::size_t i = 0; i < kLayers; ++i) {
        h = run_layer(graphed, i, h);
        skips = skips + h.square();
      }
      (h * skips).mean().backward();
      return StepTensors{{"x", x.grad()}};
    });
  }
}

TEST_F(StackTest, ForwardsWithoutBackwardAndPassesThatAreGivenUp) {
  capture();
  for (std::int64_t s = 0; s < 4; ++s) {
    expect_plain(s, [&](bool graphed) {
      StepTensors given;
      for (const std::size_t layers : {std::size_t{3}, static_cast<std::size_t>(kLayers), std::size_t{1}}) {
        at::Tensor h = rows(s, device, 5).requires_grad_(true);
        std::vector<at::Tensor> kept;
        for (std::size_t i = 0; i < layers; ++i) {
          h = run_layer(graphed, i, h);
          if (i % 2 == static_cast<std::size_t>(s) % 2) {
            kept.push_back(h.detach());
          }
        }
        for (const at::Tensor& output : kept) {
          given.emplace_back("given up", output);
        }
      }
      const at::Tensor x = rows(s, device).requires_grad_(true);
      loss(graphed, x, s).backward();
      given.emplace_back("x", x.grad());
      return given;
    });
  }
}

// Greedy training: each layer has a loss of its own, and its backward comes before the next layer's forward.
TEST_F(StackTest, AnOutputThatWasMovedIsStillTheLinkedOne) {
  capture();
  for (std::int64_t s = 0; s < 3; ++s) {
    expect_plain(s, [&](bool graphed) {
      StepTensors given;
      at::Tensor h = rows(s, device).requires_grad_(true);
      for (std::size_t i = 0; i < kLayers; ++i) {
        const at::Tensor next = run_layer(graphed, i, h);
        (next * rows(s, device, 1)).mean().backward();
        given.emplace_back("input gradient", h.grad());
        h = next.detach().requires_grad_(true);
      }
      return given;
    });
  }
}

TEST_F(StackTest, WhatIsHeldOutlivesTheGraphs) {
  for (const bool with_engine : {false, true}) {
    capture();
    std::vector<at::Tensor> held;
    std::vector<at::Tensor> expected;
    const at::Tensor x = rows(1, device).requires_grad_(true);
    at::Tensor mine = x;
    at::Tensor plain = x;
    for (std::size_t i = 0; i < 3; ++i) {
      mine = run_layer(true, i, mine);
      plain = run_layer(false, i, plain);
      held.push_back(mine.detach());
      expected.push_back(plain.detach());
    }
    mine = at::Tensor();
    if (!with_engine) {
      engine->reset();
    }
    layers.clear();
    engine.reset();
    release_cached_memory(device);
    std::vector<at::Tensor> others;
    for (int i = 0; i < 64; ++i) {
      others.push_back(at::full({16, 32}, -1.0, at::TensorOptions().device(device)));
    }
    for (std::size_t i = 0; i < held.size(); ++i) {
      EXPECT_TRUE(equal(held[i], expected[i])) << i << with_engine;
      held[i].add_(1);
    }
    for (const at::Tensor& other : others) {
      EXPECT_TRUE(equal(other, at::full({16, 32}, -1.0)));
    }
  }
}

TEST_F(StackTest, AHeldOneThatFindsNoRoomLeavesTheCallUndone) {
  capture(0);
  std::vector<at::Tensor> held;
  at::Tensor mine = rows(1, device).requires_grad_(true);
  at::Tensor plain = mine;
  std::size_t refused = 0;
  for (std::size_t i = 0; i < kLayers; ++i) {
    sim::Device::get().fail_allocation(0);
    try {
      mine = run_layer(true, i, mine);
    } catch (const DeviceError&) {
      ++refused;
    }
    sim::Device::get().fail_allocation(-1);
    if (refused > held.size()) {
      held.push_back(mine);
      mine = run_layer(true, i, mine);
    }
    plain = run_layer(false, i, plain);
    held.resize(refused);
    EXPECT_TRUE(equal(mine, plain)) << i;
  }
}

}  // namespace
}  // namespace sidestream::testing_model
