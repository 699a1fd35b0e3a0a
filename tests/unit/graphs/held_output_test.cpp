// Outputs of graphed calls that outlive the replay that made them: ordinary tensors, whatever is done with them.
#include <functional>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "expect_throws.h"
#include "models/block_model.h"
#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sim/device/device.h"

namespace sidestream::testing_model {
namespace {

class HeldOutputTest : public testing::Test {
 protected:
  /// One callable, graphed; its parameters are what `function` reads.
  [[nodiscard]] TensorFunction graph(const TensorFunction& function, const std::vector<Sample>& samples,
                                     const GraphOptions& options = {}) {
    return make_graphed_callables(engine_, {Callable("call", owning(function))}, {samples}, options)[0];
  }
  [[nodiscard]] at::Tensor input(std::int64_t s) const { return rows(s, device_).requires_grad_(true); }
  static bool equal(const at::Tensor& a, const at::Tensor& b) { return at::equal(a.cpu(), b.cpu()); }

  c10::Device device_ = find_device("sim");
  torch::nn::Module model_;
  OffloadEngine engine_{model_, Options(device_).offload("**").min_bytes(1024)};
  at::Tensor weight_ = rows(50, device_).slice(0, 0, 1).clone().requires_grad_(true);
  TensorFunction body_ = [w = weight_](const Tensors& in) { return Tensors{(in[0] * w).tanh() + in[0]}; };
};

TEST_F(HeldOutputTest, AListOfHiddenStatesIsThatOfPlainTraining) {
  const TensorFunction graphed = graph(body_, {input(0)});
  const auto run = [&](const TensorFunction& function) {
    StepTensors result;
    std::vector<at::Tensor> outputs;
    std::vector<at::Tensor> views;
    std::vector<at::Tensor> detached;
    for (std::int64_t s = 0; s < 4; ++s) {
      const at::Tensor y = function({input(s)})[0];
      y.sum().backward();
      outputs.push_back(y);
      views.push_back(y.t().slice(0, 3, 7));
      detached.push_back(y.detach());
    }
    for (const auto& kept : {outputs, views, detached}) {
      for (const at::Tensor& tensor : kept) {
        result.emplace_back("kept", tensor);
      }
    }
    return result;
  };
  EXPECT_TRUE(same(run(graphed), run(body_)));
}

TEST_F(HeldOutputTest, WhatIsHeldIsCopiedOutAndAllElseIsGivenOutAgain) {
  const TensorFunction graphed = graph(body_, {input(0)});
  const auto counts = [&](const std::function<void()>& run) {
    in_step(&engine_, run);
    const Report report = engine_.report();
    return std::vector<std::int64_t>{report.outputs_reused, report.outputs_copied, report.outputs_copied_bytes};
  };
  const auto replay = [&](std::int64_t s) { return graphed({input(s)})[0]; };
  std::int64_t bytes = 0;
  const void* place = nullptr;
  at::Tensor held;
  EXPECT_EQ(counts([&] {
              bytes = static_cast<std::int64_t>(replay(0).nbytes());
              place = replay(0).const_data_ptr();
            }),
            (std::vector<std::int64_t>{1, 0, 0}));
  EXPECT_EQ(counts([&] { held = replay(1).detach(); }), (std::vector<std::int64_t>{1, 0, 0}));
  EXPECT_EQ(held.const_data_ptr(), place);
  EXPECT_EQ(counts([&] {
              (void)replay(2);
              (void)replay(3);
            }),
            (std::vector<std::int64_t>{1, 1, bytes}));
  EXPECT_NE(held.const_data_ptr(), place);
  EXPECT_EQ(counts([&] { EXPECT_EQ(replay(4).const_data_ptr(), place); }), (std::vector<std::int64_t>{1, 0, 0}));
  EXPECT_TRUE(equal(held, body_({input(1)})[0]));
}

// The pool gives the second call's output what the first call's forward has freed, and the first replay writes it already.
TEST_F(HeldOutputTest, InMemoryThatAnEarlierForwardUsesToo) {
  const TensorFunction first = [w = weight_](const Tensors& in) { return Tensors{((in[0] * w).exp() + 1).log()}; };
  auto graphed = make_graphed_callables(engine_, {Callable("first", owning(first)), Callable("second", owning(body_))},
                                        {{input(0)}, {Sample::output_of(0)}}, GraphOptions().side_streams(1));
  std::vector<at::Tensor> kept;
  for (std::int64_t s = 0; s < 4; ++s) {
    kept.push_back(graphed[1](graphed[0]({input(s)}))[0].detach());
    const at::Tensor next = graphed[0]({input(s + 1)})[0];  // of a call that goes no further
    EXPECT_TRUE(equal(next, first({input(s + 1)})[0]));
    for (std::int64_t earlier = 0; earlier <= s; ++earlier) {
      const at::Tensor expected = body_(first({input(earlier)}))[0];
      EXPECT_TRUE(equal(kept[static_cast<std::size_t>(earlier)], expected)) << earlier << " after " << s;
    }
  }
}

// The operator saved it through detach(); its own backward comes when the call has replayed again.
TEST_F(HeldOutputTest, AnEagerOperatorThatSavedOne) {
  const TensorFunction graphed = graph(body_, {input(0)});
  const auto run = [&](const TensorFunction& function) {
    std::vector<at::Tensor> leaves;
    std::vector<at::Tensor> losses;
    for (std::int64_t s = 0; s < 3; ++s) {
      const at::Tensor y = function({input(s)})[0];
      leaves.push_back(rows(s, device_, 3).requires_grad_(true));
      losses.push_back((leaves.back() * y.detach()).square().sum());
      y.sum().backward();
    }
    StepTensors result;
    for (std::size_t s = 0; s < leaves.size(); ++s) {
      losses[s].backward();
      result.emplace_back("gradient", leaves[s].grad());
    }
    return result;
  };
  EXPECT_TRUE(same(run(graphed), run(body_)));
}

TEST_F(HeldOutputTest, OutputsThatAreViewsOfOneAnotherStaySo) {
  const TensorFunction function = [w = weight_](const Tensors& in) {
    const at::Tensor h = (in[0] * w).exp();
    return Tensors{h.slice(1, 0, 8), h.slice(1, 8, 32), h.detach().sum(0)};
  };
  const TensorFunction graphed = graph(function, {input(0)});
  const Tensors held = graphed({input(1)});
  held[0].sum().backward();
  const Tensors expected = function({input(1)});
  (void)graphed({input(2)});
  for (std::size_t i = 0; i < held.size(); ++i) {
    EXPECT_TRUE(equal(held[i], expected[i])) << i;
  }
  EXPECT_TRUE(held[0].is_alias_of(held[1]));
  EXPECT_FALSE(held[0].is_alias_of(held[2]));
  held[0].detach().add_(1);
  EXPECT_EQ(held[1]._version(), held[0]._version()) << "views share a version counter";
  EXPECT_EQ(graphed({input(3)})[0]._version(), 0U) << "each replay has its own";
}

TEST_F(HeldOutputTest, AnOutputMayBeChangedInPlaceWhereBackwardDoesNotNeedIt) {
  const TensorFunction graphed = graph(body_, {input(0)});
  const auto run = [&](const TensorFunction& function, std::int64_t s) {
    weight_.mutable_grad() = at::Tensor();
    const at::Tensor x = input(s);
    at::Tensor y = function({x})[0];
    EXPECT_EQ(y._version(), 0U);
    y.mul_(3).add_(1);
    (y * rows(s, device_, 1)).sum().backward();
    return StepTensors{{"output", y}, {"input", x.grad()}, {"weight", weight_.grad()}};
  };
  for (std::int64_t s = 0; s < 3; ++s) {
    EXPECT_TRUE(same(run(graphed, s), run(body_, s))) << "step " << s;
  }
}

TEST_F(HeldOutputTest, AnOutputThatBackwardNeedsMayNot) {
  const TensorFunction function = [w = weight_](const Tensors& in) { return Tensors{(in[0] * w).tanh()}; };
  const TensorFunction graphed = graph(function, {input(0)}, GraphOptions().retain_graph_in_backward(true));
  for (const bool by_view : {false, true}) {
    at::Tensor y = graphed({input(1)})[0];
    const at::Tensor loss = y.sum();
    loss.backward({}, /*retain_graph=*/true);
    (by_view ? y.detach().t() : y.detach()).mul_(2);
    EXPECT_THROWS(UsageError, "output 0 was changed in place before its backward, which needs it", loss.backward());
  }
  const at::Tensor x = input(2);
  graphed({x})[0].sum().backward();
  const at::Tensor x_plain = input(2);
  function({x_plain})[0].sum().backward();
  EXPECT_TRUE(equal(x.grad(), x_plain.grad()));
}

TEST_F(HeldOutputTest, OutputsThatOverlapMayNotBeChangedInPlace) {
  const TensorFunction function = [w = weight_](const Tensors& in) {
    const at::Tensor h = in[0] * w;
    return Tensors{h, h.t()};
  };
  const TensorFunction graphed = graph(function, {input(0)});
  {
    const Tensors out = graphed({input(1)});
    at::Tensor view = out[1];
    view.mul_(2);
    EXPECT_THROWS(UsageError, "shares memory with another output", out[0].sum().backward());
  }
  const at::Tensor x = input(2);
  const Tensors out = graphed({x});
  (out[0] * out[1].t()).sum().backward();
  const at::Tensor x_plain = input(2);
  const Tensors expected = function({x_plain});
  (expected[0] * expected[1].t()).sum().backward();
  EXPECT_TRUE(equal(x.grad(), x_plain.grad()));
}

/// Two calls of which the second reads the first's output where it lies.
class LinkedOutputTest : public HeldOutputTest {
 protected:
  LinkedOutputTest() {
    const auto graphed =
        make_graphed_callables(engine_, {Callable("first", owning(body_)), Callable("second", owning(second_))},
                               {{input(0)}, {Sample::output_of(0)}}, GraphOptions().retain_graph_in_backward(true));
    graphed_ = {graphed[0], graphed[1]};
  }
  /// What `change` does to the output between the calls, in plain training and graphed.
  void expect_plain(std::int64_t s, const std::function<void(at::Tensor& h)>& change) {
    const auto run = [&](const std::vector<TensorFunction>& calls) {
      weight_.mutable_grad() = at::Tensor();
      const at::Tensor x = input(s);
      at::Tensor h = calls[0]({x})[0];
      change(h);
      const at::Tensor y = calls[1]({h})[0];
      (y * rows(s, device_, 1)).sum().backward();
      return StepTensors{{"h", h}, {"y", y}, {"input", x.grad()}, {"weight", weight_.grad()}};
    };
    EXPECT_TRUE(same(run(graphed_), run({body_, second_}))) << "step " << s;
  }

  TensorFunction second_ = [w = weight_](const Tensors& in) { return Tensors{in[0].square() * w}; };
  std::vector<TensorFunction> graphed_;
};

TEST_F(LinkedOutputTest, IsReadAsItWasChangedBefore) {
  for (std::int64_t s = 0; s < 3; ++s) {
    expect_plain(s, [](at::Tensor& h) { h.mul_(0.5); });
    expect_plain(s, [](at::Tensor& /*h*/) {});
  }
}

TEST_F(LinkedOutputTest, MayNotBeChangedAfterACallHasSavedIt) {
  {
    const at::Tensor h = graphed_[0]({input(0)})[0];
    const at::Tensor loss = graphed_[1]({h})[0].sum();
    h.detach().mul_(2);
    EXPECT_THROWS(UsageError, "graphed call \"second\": input 0 was changed in place", loss.backward());
  }
  expect_plain(1, [](at::Tensor& /*other*/) {});
}

TEST_F(LinkedOutputTest, HeldOverAReplayIsNoLongerTheLinkedOne) {
  const at::Tensor old = graphed_[0]({input(0)})[0].detach();
  (void)graphed_[0]({input(1)});
  EXPECT_TRUE(equal(old, body_({input(0)})[0]));
  EXPECT_THROWS(UsageError, "output of an earlier call", (void)graphed_[1]({old.requires_grad_(true)}));
}

TEST_F(HeldOutputTest, InputsAndWeightsThatABodyGivesBackAreThemselves) {
  // In whole numbers sums are the same in any order: what a call returns again meets its own gradient elsewhere.
  const at::Tensor table = rows(60, device_).round();
  const at::Tensor weight = weight_.detach().mul(3).round().requires_grad_(true);
  const TensorFunction function = [w = weight, table](const Tensors& in) {
    const at::Tensor h = in[0] * w + table;
    return Tensors{in[0], h, w, h, in[0].view({-1}), w.t(), table};
  };
  const TensorFunction graphed = graph(function, {input(0)});
  for (std::int64_t s = 1; s < 4; ++s) {
    const auto run = [&](const TensorFunction& call) {
      weight.mutable_grad() = at::Tensor();
      const at::Tensor leaf = input(s).detach().round().requires_grad_(true);
      const at::Tensor x = leaf * 2;
      const Tensors out = call({x});
      EXPECT_TRUE(out[0].is_same(x));
      EXPECT_TRUE(out[2].is_same(weight));
      EXPECT_TRUE(out[3].is_same(out[1]));
      EXPECT_TRUE(out[4].is_alias_of(x));
      EXPECT_TRUE(out[5].is_alias_of(weight));
      EXPECT_TRUE(out[6].is_alias_of(table));
      StepTensors result;
      at::Tensor loss = (out[6] * 0).sum();
      for (std::size_t i = 0; i < 6; ++i) {
        loss = loss + out[i].square().sum();
        result.emplace_back("output", out[i]);
      }
      loss.backward();
      result.emplace_back("input", leaf.grad());
      result.emplace_back("weight", weight.grad());
      return result;
    };
    const StepTensors expected = run(function);
    EXPECT_TRUE(same(run(graphed), expected)) << "step " << s;
  }
  EXPECT_EQ(engine_.report().outputs_copied, 0);
}

TEST_F(HeldOutputTest, AnInputGivenBackIsTakenByTheNextCall) {
  const at::Tensor weight = weight_.detach().mul(3).round().requires_grad_(true);  // sums as above
  const TensorFunction passing = [w = weight](const Tensors& in) { return Tensors{in[0], in[0] * w, in[0].t()}; };
  const TensorFunction taking = [](const Tensors& in) { return Tensors{in[0] * in[1] + in[2].t()}; };
  const auto graphed =
      make_graphed_callables(engine_, {Callable("passing", owning(passing)), Callable("taking", owning(taking))},
                             {{input(0)}, {Sample::output_of(0, 0), Sample::output_of(0, 1), Sample::output_of(0, 2)}});
  for (std::int64_t s = 1; s < 4; ++s) {
    const auto run = [&](const TensorFunction& first, const TensorFunction& second) {
      const at::Tensor x = input(s).detach().round().requires_grad_(true);
      (second(first({x}))[0] * rows(s, device_, 1).round()).sum().backward();
      return x.grad().cpu();
    };
    EXPECT_TRUE(at::equal(run(graphed[0], graphed[1]), run(passing, taking))) << "step " << s;
  }
}

TEST_F(HeldOutputTest, MayGrow) {
  const TensorFunction graphed = graph(body_, {input(0)});
  at::Tensor y = graphed({input(1)})[0].detach();
  y.resize_({64, 32});
  const at::Tensor first = y.slice(0, 0, 16).clone();
  EXPECT_TRUE(equal(first, body_({input(1)})[0]));
  const at::Tensor next = graphed({input(2)})[0];
  EXPECT_TRUE(equal(next, body_({input(2)})[0]));
  EXPECT_TRUE(equal(y.slice(0, 0, 16), first));
}

TEST_F(HeldOutputTest, ThatFindsNoRoomForItsCopyIsLeftAsItIs) {
  const TensorFunction graphed = graph(body_, {input(0)});
  const at::Tensor held = graphed({input(1)})[0].detach();
  const at::Tensor expected = body_({input(1)})[0];
  const at::Tensor x = input(2);
  sim::Device::get().fail_allocation(0);
  EXPECT_THROWS(DeviceError, "out of memory", (void)graphed({x}));
  sim::Device::get().fail_allocation(-1);
  EXPECT_TRUE(equal(held, expected));
  EXPECT_TRUE(equal(graphed({x})[0], body_({x})[0]));
  EXPECT_TRUE(equal(held, expected));
}

// Transformer-XL's memory: what a block gave in the step before is an argument of this step's.
TEST_F(HeldOutputTest, TheOutputOfTheStepBeforeIsAnArgument) {
  const TensorFunction function = [w = weight_](const Tensors& in) {
    return Tensors{(in[0] * w + in[1].flip(0)).tanh()};
  };
  const TensorFunction graphed = graph(function, {input(0), rows(0, device_)});
  const auto run = [&](const TensorFunction& call) {
    StepTensors result;
    weight_.mutable_grad() = at::Tensor();
    at::Tensor memory = rows(7, device_);
    for (std::int64_t s = 0; s < 4; ++s) {
      const at::Tensor y = call({input(s), memory})[0];
      (y * memory).sum().backward();
      memory = y.detach();
      result.emplace_back("memory", memory);
    }
    result.emplace_back("weight", weight_.grad());
    return result;
  };
  EXPECT_TRUE(same(run(graphed), run(function)));
}

// The form of `ss::call`, with microbatches in flight: each has a capture of its own.
TEST(HeldOutputOfCallTest, LogitsOfAllMicrobatchesAreKept) {
  using testing_model::BlockModel;
  const c10::Device device = find_device("sim");
  BlockModel model{BlockModel::Shape{}};
  BlockModel plain{BlockModel::Shape{}};
  model.to(device);
  plain.to(device);
  OffloadEngine engine(model, Options(device).min_bytes(1024).graph("blocks.*").offload("blocks.*.*"));
  std::vector<at::Tensor> kept;
  std::vector<at::Tensor> kept_plain;
  for (std::int64_t s = 0; s < 4; ++s) {
    expect_same_step(model, &engine, plain, s, [&](BlockModel& trained) {
      std::vector<at::Tensor> losses{trained.loss_of(2 * s), trained.loss_of(2 * s + 1)};
      for (at::Tensor& loss : losses) {
        loss.backward();
        (&trained == &model ? kept : kept_plain).push_back(loss);
      }
    });
  }
  for (std::size_t i = 0; i < kept.size(); ++i) {
    EXPECT_TRUE(at::equal(kept[i].cpu(), kept_plain[i].cpu())) << i;
  }
  EXPECT_GT(engine.report().outputs_reused, 0);
}

}  // namespace
}  // namespace sidestream::testing_model
