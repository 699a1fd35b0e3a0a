// Outputs that other calls of a sequence take, by what those calls do with them: views, several readers, nodes and bodies that keep them.
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/call.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"
#include "unit/graphs/called_stack.h"
#include "unit/graphs/released_output_fixture.h"

namespace sidestream::testing_model {
namespace {

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
  /// Each takes the output of the one before.
  void capture_chain(const std::vector<TensorFunction>& functions) {
    std::vector<Part> parts;
    for (std::size_t i = 0; i < functions.size(); ++i) {
      parts.push_back({functions[i], {i == 0 ? sample() : Sample::output_of(static_cast<std::int64_t>(i) - 1)}});
    }
    capture(parts);
  }
  void expect_plain(const std::function<StepTensors(std::int64_t s, const std::vector<TensorFunction>& calls)>& pass) {
    for (std::int64_t s = 0; s < 4; ++s) {
      StepTensors mine;
      in_step(&engine_, [&] { mine = with_gradient(s, graphed_, pass); });
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
  capture_chain({tanh, block_, tanh, tanh, block_, block_});
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
  capture_chain({block_, hidden, hidden, block_, block_, block_});
  expect_plain([&](std::int64_t s, const auto& calls) { return run_through(s, calls, device_); });
}

TEST_F(LinkedCallsTest, AnOutputThatItsBodyKeeps) {
  const auto kept = std::make_shared<at::Tensor>();
  const TensorFunction keeping = [w = weight_, kept](const Tensors& in) {
    const at::Tensor y = in[0] + (in[0] * w).sin();
    *kept = y.detach();
    return Tensors{y};
  };
  capture_chain({block_, keeping, block_, block_, block_});
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
  capture_chain({block_, block_, block_, block_});
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

class ReleasedOutputOfCallTest : public ReleasedOutputTest, public testing::WithParamInterface<bool> {};

TEST_P(ReleasedOutputOfCallTest, MicrobatchesInFlightTrainAsPlainTraining) {
  CalledStack model(device_, {}, 6);
  CalledStack plain(device_, {}, 6);
  OffloadEngine engine(model, options().graph("layers.*"));
  const bool keeps_all = GetParam();
  for (std::int64_t s = 0; s < 5; ++s) {
    expect_same_step(model, &engine, plain, s, [&](CalledStack& trained) {
      std::vector<at::Tensor> kept;
      std::vector<at::Tensor> losses;
      for (const std::int64_t microbatch : {0, 1}) {
        at::Tensor h = rows(2 * s + microbatch, device_).requires_grad_(true);
        for (std::size_t i = 0; i < trained.layers->size(); ++i) {
          h = trained.run_layer(i, h);
          if (keeps_all) {
            kept.push_back(h);
          }
        }
        losses.push_back((h * rows(2 * s + microbatch, device_, 1)).sum());
      }
      for (at::Tensor& loss : losses) {
        loss.backward();
      }
      return values(kept);
    });
  }
  EXPECT_GT(engine.report().replays, 0);
}

INSTANTIATE_TEST_SUITE_P(KeepsAll, ReleasedOutputOfCallTest, testing::Bool());

}  // namespace
}  // namespace sidestream::testing_model
