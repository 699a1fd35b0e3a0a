// Outputs that other calls of a chain take as inputs: they leave with what autograd saves, their memory goes back to the pool when no
// graph needs it any more, and whoever holds one has it all the same.
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include "expect_throws.h"
#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sim/device/device.h"

namespace sidestream {
namespace {

using testing_model::Mlp;
using testing_model::rows;
using testing_model::same;
using testing_model::StepTensors;

constexpr std::int64_t kLayers = 8;
constexpr std::int64_t kOutputBytes = 16 * testing_model::kHidden * 4;

class ReleasedOutputTest : public testing::Test {
 protected:
  [[nodiscard]] Options options() const { return Options(device_).offload("**").min_bytes(1024); }
  static bool equal(const at::Tensor& a, const at::Tensor& b) { return at::equal(a.cpu(), b.cpu()); }

  c10::Device device_ = find_device("sim");
};

/// A linked stack beside its plain twin.
class StackTest : public ReleasedOutputTest {
 protected:
  void capture(const GraphOptions& graph = {}, std::optional<std::size_t> lag = std::nullopt) {
    Options with = options();
    if (lag) {
      with.lag(*lag);
    }
    engine_.emplace(*model_, with);
    layers_ = testing_model::graph_stack(*engine_, model_, device_, graph);
  }
  [[nodiscard]] at::Tensor run(std::size_t layer, const at::Tensor& h, bool graphed) {
    return graphed ? layers_[layer]({h})[0] : (plain_->begin() + static_cast<std::ptrdiff_t>(layer))->forward(h);
  }
  /// What `pass` gives, with all gradients, graphed and in plain training.
  void expect_plain(std::int64_t s, const std::function<StepTensors(bool graphed)>& pass) {
    const auto both = [&](torch::nn::Sequential& model, bool graphed) {
      StepTensors given;
      const StepTensors gradients =
          testing_model::train_step(*model, graphed ? &*engine_ : nullptr, [&] { given = pass(graphed); });
      given.insert(given.end(), gradients.begin(), gradients.end());
      return given;
    };
    EXPECT_TRUE(same(both(model_, true), both(plain_, false))) << "step " << s;
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

  torch::nn::Sequential model_ = testing_model::layer_stack(kLayers, device_);
  torch::nn::Sequential plain_ = testing_model::layer_stack(kLayers, device_);
  std::optional<OffloadEngine> engine_;
  std::vector<GraphedCallable> layers_;
};

TEST_F(StackTest, LinkedInputsThatAreSavedLeaveWithTheirGroup) {
  capture();
  OffloadEngine other(*plain_, options());
  const auto unlinked = testing_model::graph_stack(other, plain_, device_, GraphOptions(), /*linked=*/false);
  EXPECT_EQ(norm_bytes(*engine_, 0), norm_bytes(other, 0)) << "a sample is nobody's output";
  for (std::int64_t layer = 1; layer + 2 < kLayers; ++layer) {
    EXPECT_EQ(norm_bytes(*engine_, layer), norm_bytes(other, layer) + kOutputBytes) << layer;
  }
}

TEST_F(StackTest, AChainKeepsNoOutputThatItsLayersHaveRead) {
  const auto kept = [&](std::int64_t count, std::int64_t bound) {
    torch::nn::Sequential model = testing_model::layer_stack(count, device_);
    OffloadEngine engine(*model, options());
    synchronize(device_);
    const std::int64_t before = memory_use(device_).allocated;
    const auto layers = testing_model::graph_stack(engine, model, device_, GraphOptions());
    synchronize(device_);
    // Autograd's threads let go of what they had a little later.
    for (int look = 0; look < 2000 && memory_use(device_).allocated - before > bound; ++look) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return memory_use(device_).allocated - before;
  };
  // The first input, the seed of the last output and that output: no layer takes it.
  EXPECT_LE(kept(kLayers, 3 * kOutputBytes), 3 * kOutputBytes);
  EXPECT_LE(kept(2 * kLayers, 3 * kOutputBytes), 3 * kOutputBytes);
}

TEST_F(StackTest, TrainsAsPlainTraining) {
  for (const std::optional<std::size_t> lag : {std::optional<std::size_t>(), std::optional<std::size_t>(0)}) {
    capture({}, lag);
    for (std::int64_t s = 0; s < 4; ++s) {
      expect_plain(s, [&](bool graphed) {
        const at::Tensor x = rows(s, device_).requires_grad_(true);
        at::Tensor h = x;
        for (std::size_t i = 0; i < kLayers; ++i) {
          h = run(i, h, graphed);
        }
        (h * rows(s, device_, 1)).mean().backward();
        return StepTensors{{"x", x.grad()}};
      });
      EXPECT_EQ(engine_->report().outputs_copied, 0);
    }
  }
}

TEST_F(StackTest, WhoKeepsAllOutputsHasThoseOfPlainTraining) {
  capture();
  for (std::int64_t s = 0; s < 3; ++s) {
    expect_plain(s, [&](bool graphed) {
      std::vector<at::Tensor> kept;
      at::Tensor h = rows(s, device_).requires_grad_(true);
      StepTensors given;
      for (std::size_t i = 0; i < kLayers; ++i) {
        h = run(i, h, graphed);
        kept.push_back(h);
        given.emplace_back("earliest, read meanwhile", kept.front());
      }
      for (const at::Tensor& output : kept) {
        given.emplace_back("before backward", output);
      }
      (h * rows(s, device_, 1)).mean().backward();
      for (const at::Tensor& output : kept) {
        given.emplace_back("behind backward", output);
      }
      return given;
    });
    EXPECT_GE(engine_->report().outputs_copied, kLayers - 1);
    EXPECT_GE(engine_->report().outputs_copied_bytes, (kLayers - 1) * kOutputBytes);
  }
}

TEST_F(StackTest, AResidualSkipOutsideOfTheCalls) {
  capture();
  for (std::int64_t s = 0; s < 3; ++s) {
    expect_plain(s, [&](bool graphed) {
      const at::Tensor x = rows(s, device_).requires_grad_(true);
      at::Tensor h = x;
      at::Tensor skips = x * 2;
      for (std::size_t i = 0; i < kLayers; ++i) {
        h = run(i, h, graphed);
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
        at::Tensor h = rows(s, device_, 5).requires_grad_(true);
        std::vector<at::Tensor> kept;
        for (std::size_t i = 0; i < layers; ++i) {
          h = run(i, h, graphed);
          if (i % 2 == static_cast<std::size_t>(s) % 2) {
            kept.push_back(h.detach());
          }
        }
        for (const at::Tensor& output : kept) {
          given.emplace_back("given up", output);
        }
      }
      const at::Tensor x = rows(s, device_).requires_grad_(true);
      at::Tensor h = x;
      for (std::size_t i = 0; i < kLayers; ++i) {
        h = run(i, h, graphed);
      }
      (h * rows(s, device_, 1)).mean().backward();
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
      at::Tensor h = rows(s, device_).requires_grad_(true);
      for (std::size_t i = 0; i < kLayers; ++i) {
        const at::Tensor next = run(i, h, graphed);
        (next * rows(s, device_, 1)).mean().backward();
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
    const at::Tensor x = rows(1, device_).requires_grad_(true);
    at::Tensor mine = x;
    at::Tensor plain = x;
    for (std::size_t i = 0; i < 3; ++i) {
      mine = run(i, mine, true);
      plain = run(i, plain, false);
      held.push_back(mine.detach());
      expected.push_back(plain.detach());
    }
    mine = at::Tensor();
    if (!with_engine) {
      engine_->reset();
    }
    layers_.clear();
    engine_.reset();
    release_cached_memory(device_);
    std::vector<at::Tensor> others;
    for (int i = 0; i < 64; ++i) {
      others.push_back(at::full({16, 32}, -1.0, at::TensorOptions().device(device_)));
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
  capture({}, 0);
  std::vector<at::Tensor> held;
  at::Tensor mine = rows(1, device_).requires_grad_(true);
  at::Tensor plain = mine;
  std::size_t refused = 0;
  for (std::size_t i = 0; i < kLayers; ++i) {
    sim::Device::get().fail_allocation(0);
    try {
      mine = run(i, mine, true);
    } catch (const DeviceError&) {
      ++refused;
    }
    sim::Device::get().fail_allocation(-1);
    if (refused > held.size()) {
      held.push_back(mine);
      mine = run(i, mine, true);
    }
    plain = run(i, plain, false);
    held.resize(refused);
    EXPECT_TRUE(equal(mine, plain)) << i;
  }
}

/// Calls that are functions, each beside what it is in plain training.
class LinkedCallsTest : public ReleasedOutputTest {
 protected:
  struct Part {
    TensorFunction function;
    std::vector<Sample> samples;  ///< of those that are not linked, [16, 32] with a gradient
  };
  void capture(const std::vector<Part>& parts) {
    std::vector<Callable> callables;
    std::vector<std::vector<Sample>> samples;
    for (const Part& part : parts) {
      callables.emplace_back("call." + std::to_string(callables.size()), owning(part.function));
      samples.push_back(part.samples);
      plain_.push_back(
          [function = part.function](const Tensors& in) {  // what a call adds up of an input, it adds up first
            Tensors views;
            for (const at::Tensor& each : in) {
              views.push_back(each.view_as(each));
            }
            return function(views);
          });
    }
    const auto graphed = make_graphed_callables(engine_, std::move(callables), samples, GraphOptions());
    graphed_.assign(graphed.begin(), graphed.end());
  }
  void expect_plain(const std::function<StepTensors(std::int64_t s, const std::vector<TensorFunction>& calls)>& pass) {
    for (std::int64_t s = 0; s < 4; ++s) {
      StepTensors mine;
      testing_model::in_step(&engine_, [&] { mine = with_gradient(s, graphed_, pass); });
      EXPECT_TRUE(same(mine, with_gradient(s, plain_, pass))) << "step " << s;
    }
  }
  [[nodiscard]] Sample sample() const { return Sample(rows(900, device_).requires_grad_(true)); }

  torch::nn::Module model_;
  OffloadEngine engine_{model_, options()};
  at::Tensor weight_ = rows(50, device_).slice(0, 0, 1).clone().requires_grad_(true);
  TensorFunction block_ = [w = weight_](const Tensors& in) {
    return Tensors{in[0] + (in[0].square() * w).tanh() * 0.1};
  };
  std::vector<TensorFunction> graphed_;
  std::vector<TensorFunction> plain_;

 private:
  StepTensors with_gradient(std::int64_t s, const std::vector<TensorFunction>& calls,
                            const std::function<StepTensors(std::int64_t, const std::vector<TensorFunction>&)>& pass) {
    weight_.mutable_grad() = at::Tensor();
    StepTensors given = pass(s, calls);
    given.emplace_back("weight", weight_.grad());
    return given;
  }
};

/// Through all calls, each given the outputs of the one before.
StepTensors run_through(std::int64_t s, const std::vector<TensorFunction>& calls, c10::Device device) {
  const at::Tensor x = rows(s, device).requires_grad_(true);
  Tensors h{x};
  for (const TensorFunction& call : calls) {
    h = call(h);
  }
  (h[0] * rows(s, device, 1)).sum().backward();
  return {{"x", x.grad()}, {"y", h[0]}};
}

TEST_F(LinkedCallsTest, TwoOutputsInOneStorage) {
  const TensorFunction halves = [weight = weight_](const Tensors& in) {
    const at::Tensor w = weight.view_as(weight);
    const at::Tensor h = at::cat({in[0] * w, in[0] + w}, 1).exp() * 0.1;
    return Tensors{h.slice(1, 0, 32), h.slice(1, 32, 64)};
  };
  const TensorFunction join = [](const Tensors& in) { return Tensors{in[0].square() * 0.5 + in[1].sin()}; };
  capture({{block_, {sample()}},
           {halves, {Sample::output_of(0)}},
           {join, {Sample::output_of(1, 0), Sample::output_of(1, 1)}},
           {block_, {Sample::output_of(2)}},
           {block_, {Sample::output_of(3)}},
           {block_, {Sample::output_of(4)}}});
  expect_plain([&](std::int64_t s, const auto& calls) { return run_through(s, calls, device_); });
}

TEST_F(LinkedCallsTest, AnOutputThatItsOwnCallSaves) {
  const TensorFunction tanh = [w = weight_](const Tensors& in) { return Tensors{(in[0] * w + in[0]).tanh()}; };
  capture({{tanh, {sample()}},
           {block_, {Sample::output_of(0)}},
           {tanh, {Sample::output_of(1)}},
           {tanh, {Sample::output_of(2)}},
           {block_, {Sample::output_of(3)}},
           {block_, {Sample::output_of(4)}}});
  expect_plain([&](std::int64_t s, const auto& calls) { return run_through(s, calls, device_); });
}

TEST_F(LinkedCallsTest, AnOutputThatALaterCallTakesToo) {
  const TensorFunction two = [w = weight_](const Tensors& in) { return Tensors{in[0].square() * w + in[1].sin()}; };
  for (const bool late_one_saves : {false, true}) {
    graphed_.clear();
    plain_.clear();
    const TensorFunction last = late_one_saves ? two : [](const Tensors& in) { return Tensors{in[0] * 2 + in[1]}; };
    capture({{block_, {sample()}},
             {block_, {Sample::output_of(0)}},
             {block_, {Sample::output_of(1)}},
             {block_, {Sample::output_of(2)}},
             {last, {Sample::output_of(3), Sample::output_of(0)}},
             {block_, {Sample::output_of(4)}}});
    expect_plain([&](std::int64_t s, const auto& calls) {
      const at::Tensor x = rows(s, device_).requires_grad_(true);
      const at::Tensor first = calls[0]({x})[0];
      const at::Tensor h = calls[3](calls[2](calls[1]({first})))[0];
      const at::Tensor y = calls[5](calls[4]({h, first}))[0];
      (y * rows(s, device_, 1)).sum().backward();
      return StepTensors{{"x", x.grad()}, {"y", y}};
    });
  }
}

TEST_F(LinkedCallsTest, AnInputThatIsGivenOn) {
  const TensorFunction passing = [w = weight_](const Tensors& in) { return Tensors{in[0].square() * w, in[0]}; };
  const TensorFunction taking = [](const Tensors& in) { return Tensors{in[0].sin() + in[1].cos()}; };
  capture({{block_, {sample()}},
           {passing, {Sample::output_of(0)}},
           {taking, {Sample::output_of(1, 0), Sample::output_of(1, 1)}},
           {block_, {Sample::output_of(2)}},
           {block_, {Sample::output_of(3)}}});
  expect_plain([&](std::int64_t s, const auto& calls) { return run_through(s, calls, device_); });
}

/// Keeps its input where no hook sees it.
struct HiddenSquare : torch::autograd::Function<HiddenSquare> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->saved_data["x"] = x.detach();
    return x * x;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    return {grads[0] * 2 * context->saved_data["x"].toTensor()};
  }
};

TEST_F(LinkedCallsTest, AnInputThatANodeKeepsAsItIs) {
  const TensorFunction hidden = [w = weight_](const Tensors& in) {
    return Tensors{in[0] + HiddenSquare::apply(in[0]) * 0.1 + w};
  };
  capture({{block_, {sample()}},
           {hidden, {Sample::output_of(0)}},
           {hidden, {Sample::output_of(1)}},
           {block_, {Sample::output_of(2)}},
           {block_, {Sample::output_of(3)}},
           {block_, {Sample::output_of(4)}}});
  expect_plain([&](std::int64_t s, const auto& calls) { return run_through(s, calls, device_); });
}

TEST_F(LinkedCallsTest, AnOutputThatItsBodyKeeps) {
  const auto kept = std::make_shared<at::Tensor>();
  const TensorFunction keeping = [w = weight_, kept](const Tensors& in) {
    const at::Tensor y = in[0] + (in[0] * w).sin();
    *kept = y.detach();
    return Tensors{y};
  };
  capture({{block_, {sample()}},
           {keeping, {Sample::output_of(0)}},
           {block_, {Sample::output_of(1)}},
           {block_, {Sample::output_of(2)}},
           {block_, {Sample::output_of(3)}}});
  at::Tensor mine = *kept;
  for (std::int64_t s = 0; s < 3; ++s) {
    (void)run_through(s, graphed_, device_);
    const at::Tensor read = mine.cpu();
    (void)run_through(s, plain_, device_);
    EXPECT_TRUE(at::equal(read, kept->cpu())) << s;
    *kept = mine;
  }
}

TEST_F(LinkedCallsTest, OutputsThatAreChangedInPlaceBetweenTheCalls) {
  capture({{block_, {sample()}},
           {block_, {Sample::output_of(0)}},
           {block_, {Sample::output_of(1)}},
           {block_, {Sample::output_of(2)}}});
  expect_plain([&](std::int64_t s, const auto& calls) {
    const at::Tensor x = rows(s, device_).requires_grad_(true);
    at::Tensor h = x;
    for (const TensorFunction& call : calls) {
      h = call({h})[0];
      h.mul_(0.5);
    }
    (h * rows(s, device_, 1)).mean().backward();
    return StepTensors{{"x", x.grad()}};
  });
}

/// Blocks that call each other's outputs, and give out all of them.
class Blocks : public torch::nn::Module {
 public:
  explicit Blocks(c10::Device device) : layers(testing_model::layer_stack(6, device)) {
    register_module("layers", layers);
  }
  std::vector<at::Tensor> forward(const at::Tensor& x) {
    std::vector<at::Tensor> states{x};
    for (std::size_t i = 0; i < layers->size(); ++i) {
      states.push_back(call(&layers->at<Mlp>(i), states.back()));
    }
    return states;
  }
  torch::nn::Sequential layers;
};

class ReleasedOutputOfCallTest : public ReleasedOutputTest, public testing::WithParamInterface<bool> {};

TEST_P(ReleasedOutputOfCallTest, MicrobatchesInFlightTrainAsPlainTraining) {
  Blocks model(device_);
  Blocks plain(device_);
  OffloadEngine engine(model, options().graph("layers.*"));
  const bool keeps_all = GetParam();
  const auto train = [&](Blocks& trained, std::int64_t s) {
    StepTensors given;
    std::vector<std::vector<at::Tensor>> states;
    std::vector<at::Tensor> losses;
    for (const std::int64_t microbatch : {0, 1}) {
      states.push_back(trained.forward(rows(2 * s + microbatch, device_).requires_grad_(true)));
      losses.push_back((states.back().back() * rows(2 * s + microbatch, device_, 1)).sum());
      if (!keeps_all) {
        states.back().clear();
      }
    }
    for (at::Tensor& loss : losses) {
      loss.backward();
    }
    for (const auto& kept : states) {
      for (const at::Tensor& state : kept) {
        given.emplace_back("state", state);
      }
    }
    return given;
  };
  testing_model::expect_plain(
      0, 5,
      [&](std::int64_t s) {
        StepTensors given;
        StepTensors all = testing_model::train_step(model, &engine, [&] { given = train(model, s); });
        all.insert(all.end(), given.begin(), given.end());
        return all;
      },
      [&](std::int64_t s) {
        StepTensors given;
        StepTensors all = testing_model::train_step(plain, nullptr, [&] { given = train(plain, s); });
        all.insert(all.end(), given.begin(), given.end());
        return all;
      });
  EXPECT_GT(engine.report().replays, 0);
}

INSTANTIATE_TEST_SUITE_P(KeepsAll, ReleasedOutputOfCallTest, testing::Bool());

}  // namespace
}  // namespace sidestream
