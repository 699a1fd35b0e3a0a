// What becomes of the gradients of parameters: tests that the reference systems have, under their names, for each policy.
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "conformance/fixture.h"
#include "expect_throws.h"
#include "models/stack_twins.h"
#include "observe/operator_observer.h"
#include "runtime/replayed_memory.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/graphed_step.h"

namespace sidestream::testing_model {
namespace {

bool is_graph_memory(const at::Tensor& tensor) { return ReplayedMemory::of(tensor.storage().data_ptr()) != nullptr; }

GraphOptions all_by(GradientPolicy policy) { return GraphOptions().gradients("**", policy); }

/// Three linked layers.
class GradientsFixture : public conformance::ConformanceTest, protected StackTwins {
 protected:
  GradientsFixture() : StackTwins(device_, 3) {}

  void capture(const GraphOptions& options) {
    StackTwins::capture(Options(device).offload("layers.*.fc1").min_bytes(1024), options);
  }
  void backward(bool graphed, std::int64_t s) { loss(graphed, input(s), s).backward(); }
  void clear_both() {
    clear_gradients(*model);
    clear_gradients(*plain);
  }
  /// A backward of both models adds the same to their gradients.
  void expect_same_backward(std::int64_t s) {
    backward(true, s);
    backward(false, s);
    EXPECT_TRUE(same(gradients(*model), gradients(*plain))) << "step " << s;
  }
  std::int64_t gradients_copied(const std::function<void()>& run) {
    in_step(&*engine, run);
    return engine->report().gradients_copied;
  }
};

/// Gradients that the caller may keep: those of parameters by a policy, or the input's if there is none.
class ReturnedGradientsTest : public GradientsFixture,
                              public testing::WithParamInterface<std::optional<GradientPolicy>> {
 protected:
  void capture_returned(GraphOptions options = {}) {
    capture(GetParam() ? options.gradients("**", *GetParam()) : options);
  }
  /// Takes the gradients of a backward from the leaves that have them.
  [[nodiscard]] std::vector<at::Tensor> taken_from(bool graphed, const at::Tensor& x) {
    std::vector<at::Tensor> leaves = GetParam() ? (graphed ? model : plain)->parameters() : std::vector<at::Tensor>{x};
    std::vector<at::Tensor> gradients;
    for (at::Tensor& leaf : leaves) {
      gradients.push_back(leaf.grad());
      leaf.mutable_grad() = at::Tensor();
    }
    return gradients;
  }
  [[nodiscard]] std::vector<at::Tensor> pass(bool graphed, std::int64_t s) {
    const at::Tensor x = input(s);
    loss(graphed, x, s).backward();
    return taken_from(graphed, x);
  }
  /// Of `passes`, in order, without graphs.
  [[nodiscard]] std::vector<StepTensors> plain_passes(std::int64_t passes) {
    std::vector<StepTensors> result;
    for (std::int64_t s = 0; s < passes; ++s) {
      result.push_back(values(pass(false, s)));
    }
    return result;
  }
};

TEST_P(ReturnedGradientsTest, ReturnsOwnedParameterGrads) {
  capture_returned();
  const std::vector<StepTensors> expected = plain_passes(4);
  std::vector<std::vector<at::Tensor>> held;
  std::vector<at::Tensor> parts;
  for (std::int64_t s = 0; s < 4; ++s) {
    held.push_back(pass(true, s));
    parts.push_back(held.back()[0].t().slice(0, 3, 7));
  }
  for (std::size_t s = 0; s < held.size(); ++s) {
    EXPECT_TRUE(same(values(held[s]), expected[s])) << "held since step " << s;
    EXPECT_TRUE(same(values({parts[s]}), values({held[s][0].t().slice(0, 3, 7)})));
    for (std::size_t i = 0; s > 0 && i < held[s].size(); ++i) {
      EXPECT_NE(held[s][i].const_data_ptr(), held[s - 1][i].const_data_ptr());
    }
  }
}

TEST_P(ReturnedGradientsTest, AHeldOneOutlivesItsEngine) {
  capture_returned();
  const std::vector<StepTensors> expected = plain_passes(2);
  const std::vector<at::Tensor> first = pass(true, 0);
  const std::vector<at::Tensor> latest = pass(true, 1);
  layers.clear();
  engine.reset();
  EXPECT_TRUE(same(values(first), expected[0]));
  EXPECT_TRUE(same(values(latest), expected[1]));
}

TEST_P(ReturnedGradientsTest, OutlivesForwardsAlone) {
  capture_returned();
  const StepTensors expected = plain_passes(1)[0];
  const std::vector<at::Tensor> held = pass(true, 0);
  for (std::size_t count = 1; count <= 3; ++count) {  // their temporaries lie where the pool had room
    at::Tensor h = input(static_cast<std::int64_t>(count));
    for (std::size_t i = 0; i < count; ++i) {
      h = layers[i]({h})[0];
    }
    EXPECT_TRUE(same(values(held), expected)) << "behind " << count << " forwards";
  }
}

TEST_P(ReturnedGradientsTest, ThoseOfAFirstBackwardOutliveASecond) {
  capture_returned(GraphOptions().retain_graph_in_backward(true));
  const auto both = [&](bool graphed) {
    const at::Tensor x = input(0);
    const at::Tensor y = forward(graphed, x);
    y.backward(rows(1, device, 1), /*retain_graph=*/true);
    std::vector<at::Tensor> held = taken_from(graphed, x);
    y.backward(rows(2, device, 1));
    for (const at::Tensor& gradient : taken_from(graphed, x)) {
      held.push_back(gradient);
    }
    return values(held);
  };
  EXPECT_TRUE(same(both(true), both(false)));
}

INSTANTIATE_TEST_SUITE_P(Of, ReturnedGradientsTest,
                         testing::Values(GradientPolicy::cloned, GradientPolicy::owned, std::nullopt));

class AddedUpGradientsTest : public GradientsFixture, public testing::WithParamInterface<GradientPolicy> {};

TEST_P(AddedUpGradientsTest, AccumulatesOwnedParameterGrads) {
  capture(all_by(GetParam()));
  for (std::int64_t s = 0; s < 6; ++s) {
    expect_same_backward(s);
    if (s % 3 == 2) {
      clear_both();
    }
  }
}

TEST_P(AddedUpGradientsTest, TrainsWithGradientsThatAreZeroedInPlace) {
  capture(all_by(GetParam()));
  torch::optim::SGD of_model(model->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  torch::optim::SGD of_plain(plain->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  for (std::int64_t s = 0; s < 5; ++s) {
    expect_same_backward(s);
    for (torch::optim::SGD* optimizer : {&of_model, &of_plain}) {
      optimizer->step();
      optimizer->zero_grad(/*set_to_none=*/s == 2);
    }
  }
}

TEST_P(AddedUpGradientsTest, ASecondBackwardOfAKeptGraph) {
  capture(all_by(GetParam()).retain_graph_in_backward(true));
  for (std::int64_t s = 0; s < 3; ++s) {
    const at::Tensor of_mine = loss(true, input(s), s);
    const at::Tensor of_plain = loss(false, input(s), s);
    for (const bool keep : {true, false}) {
      of_mine.backward({}, keep);
      of_plain.backward({}, keep);
    }
    EXPECT_TRUE(same(gradients(*model), gradients(*plain))) << "step " << s;
    clear_both();
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, AddedUpGradientsTest,
                         testing::Values(GradientPolicy::cloned, GradientPolicy::owned, GradientPolicy::accumulated));

using GradientPolicyTest = GradientsFixture;

TEST_F(GradientPolicyTest, CanSkipParameterGradClone) {
  capture(all_by(GradientPolicy::owned));
  expect_same_backward(0);
  std::vector<const void*> places;
  for (const at::Tensor& parameter : model->parameters()) {
    EXPECT_TRUE(is_graph_memory(parameter.grad())) << "autograd takes over what it is given";
    places.push_back(parameter.grad().const_data_ptr());
  }
  for (std::int64_t s = 1; s < 4; ++s) {
    clear_both();
    EXPECT_EQ(gradients_copied([&] { expect_same_backward(s); }), 0);
    std::size_t next = 0;
    for (const at::Tensor& parameter : model->parameters()) {
      EXPECT_EQ(parameter.grad().const_data_ptr(), places[next++]);
    }
  }
}

TEST_F(GradientPolicyTest, ClonesAreNoGraphsMemory) {
  capture({});
  expect_same_backward(0);
  for (const at::Tensor& parameter : model->parameters()) {
    EXPECT_FALSE(is_graph_memory(parameter.grad()));
  }
}

TEST_F(GradientPolicyTest, WhatIsHeldIsCopiedOutOnce) {
  capture(all_by(GradientPolicy::owned));
  expect_same_backward(0);
  const auto count = static_cast<std::int64_t>(model->parameters().size());
  EXPECT_EQ(gradients_copied([&] { expect_same_backward(1); }), count) << "they are added into";
  EXPECT_EQ(gradients_copied([&] { expect_same_backward(2); }), 0) << "by now they have memory of their own";
}

TEST_F(GradientPolicyTest, PreservesSkippedParameterGradAlias) {
  capture(GraphOptions()
              .gradients("**", GradientPolicy::owned)
              .gradients("*.fc2", GradientPolicy::accumulated)
              .gradients("1.*", GradientPolicy::cloned));
  std::vector<at::Tensor> first;
  for (std::int64_t s = 0; s < 4; ++s) {
    expect_same_backward(s);
    std::size_t next = 0;
    for (const auto& item : model->named_parameters()) {
      const at::Tensor& grad = item.value().grad();
      if (s == 0) {
        first.push_back(grad);
      }
      const bool cloned = item.key().rfind("1.", 0) == 0;
      const bool accumulated = !cloned && item.key().find("fc2") != std::string::npos;
      EXPECT_EQ(is_graph_memory(grad), !cloned && !accumulated) << item.key();
      if (accumulated) {
        EXPECT_TRUE(grad.is_same(first[next])) << item.key() << ": the graph's own .grad, whatever is set to none";
      }
      ++next;
    }
    clear_both();
  }
}

TEST_F(GradientPolicyTest, AnOwnedOneIsWhereTheBackwardComputedIt) {
  const auto clones_of_a_capture = [&](GradientPolicy policy) {
    std::int64_t clones = 0;
    const OperatorObserverGuard observer(
        [&](const OperatorAccess& access) { clones += access.name == std::string_view("aten::clone") ? 1 : 0; });
    (void)graph_stack(*engine, model, device, all_by(policy));
    return clones;
  };
  capture(all_by(GradientPolicy::cloned));
  EXPECT_EQ(clones_of_a_capture(GradientPolicy::owned), clones_of_a_capture(GradientPolicy::cloned));
}

TEST_F(GradientPolicyTest, SnapshotsGradientPolicy) {
  GraphOptions options = all_by(GradientPolicy::owned);
  capture(options);
  options.gradients("**", GradientPolicy::cloned);
  expect_same_backward(0);
  const auto all_owned = [&] {
    for (const at::Tensor& parameter : model->parameters()) {
      EXPECT_TRUE(is_graph_memory(parameter.grad()));
    }
  };
  all_owned();
  clear_both();
  relocate(*model);  // a capture in place of the first keeps its policies
  expect_same_backward(1);
  all_owned();
}

TEST_F(GradientPolicyTest, AnAccumulatingGraphTakesNoMemoryThatAnotherGivesOut) {
  capture(all_by(GradientPolicy::owned));
  expect_same_backward(0);  // what is attached now is memory of these graphs
  auto adding = graph_stack(*engine, model, device, GraphOptions().gradients("**", GradientPolicy::accumulated));
  clear_both();
  for (std::int64_t s = 1; s < 5; ++s) {
    expect_same_backward(s);
    (run_stack(adding, input(10 + s)) * rows(10 + s, device, 1)).mean().backward();
    backward(false, 10 + s);
    EXPECT_TRUE(same(gradients(*model), gradients(*plain))) << "behind the graph that adds, step " << s;
    clear_both();
  }
}

TEST_F(GradientPolicyTest, AnAccumulatedOneThatIsGivenOtherMemoryIsTakenBack) {
  capture(all_by(GradientPolicy::accumulated));
  expect_same_backward(0);
  const auto exchange = [](const torch::nn::Sequential& model) {
    for (const at::Tensor& parameter : model->parameters()) {
      parameter.grad().set_data(parameter.grad() * 2);
    }
  };
  for (std::int64_t s = 1; s < 4; ++s) {  // what comes in adds up with what was put there
    exchange(model);
    exchange(plain);
    expect_same_backward(s);
  }
  exchange(model);
  exchange(plain);
  EXPECT_THROWS(UsageError, "Set .grad to none, and run a backward of those graphs",
                (void)graph_stack(*engine, model, device, all_by(GradientPolicy::accumulated)));
  clear_both();
  expect_same_backward(4);
  const at::Tensor other = at::zeros_like(model->parameters()[0]);
  model->parameters()[0].grad().set_data(other);
  EXPECT_THROWS(UsageError, "given other memory", backward(true, 5));
  EXPECT_EQ(other.abs().sum().item<float>(), 0);
}

TEST_F(GradientPolicyTest, AnAccumulatedOneHasTheParametersDtype) {
  model->parameters()[0].mutable_grad() = at::zeros_like(model->parameters()[0], at::kDouble);
  capture(all_by(GradientPolicy::accumulated));
  EXPECT_THROWS(UsageError, "was replaced by another tensor", backward(true, 0));
  clear_both();
  expect_same_backward(1);
}

TEST_F(GradientPolicyTest, HooksSeeWhatIsGivenOutAndMayKeepIt) {
  capture(all_by(GradientPolicy::owned));
  std::vector<at::Tensor> seen;
  model->parameters()[1].register_hook([&](const at::Tensor& grad) { seen.push_back(grad); });
  StepTensors then;
  for (std::int64_t s = 0; s < 3; ++s) {
    expect_same_backward(s);
    then.emplace_back("held", seen.back());
    clear_both();
  }
  EXPECT_TRUE(same(values(seen), then));
}

TEST_F(GradientPolicyTest, AccumulatedOnesAloneRefuseHooksAndNamedGradients) {
  const at::Tensor hooked = model->parameters()[2];
  const auto handle = hooked.register_hook([](const at::Tensor& grad) { return grad; });
  EXPECT_THROWS(UsageError, "gradient hooks", capture(all_by(GradientPolicy::accumulated)));
  capture(all_by(GradientPolicy::accumulated).gradients("0.fc2", GradientPolicy::owned));
  expect_same_backward(0);
  EXPECT_THROWS(UsageError, "only gradients of some inputs", {
    const at::Tensor x = input(1);
    (void)torch::autograd::grad({loss(true, x, 1)}, {x});
  });
  hooked.remove_hook(handle);
}

TEST_F(GradientPolicyTest, APatternThatFitsNoParameterIsRefused) {
  EXPECT_THROWS(UsageError, "matches no parameter", capture(GraphOptions().gradients("0.fc3", GradientPolicy::owned)));
  EXPECT_THROWS(UsageError, "empty component", capture(GraphOptions().gradients("0..fc2", GradientPolicy::owned)));
  capture(all_by(GradientPolicy::owned));
  expect_same_backward(0);
}

TEST_F(GradientPolicyTest, ARuleMayHaveAListOfPatterns) {
  for (const std::string list : {"0.fc1,0.fc2,1.fc2", " 0.{fc1,fc2} , 1.fc2 "}) {
    capture(GraphOptions().gradients(list, GradientPolicy::owned));
    expect_same_backward(0);
    for (const auto& item : model->named_parameters()) {
      const bool owned = item.key() == "0.fc1" || item.key() == "0.fc2" || item.key() == "1.fc2";
      EXPECT_EQ(is_graph_memory(item.value().grad()), owned) << item.key();
    }
    clear_both();
  }
  for (const std::string wrong : {"0.fc2,0.fc3", "0.fc2,", "off", ""}) {
    EXPECT_THROWS(UsageError, "pattern", capture(GraphOptions().gradients(wrong, GradientPolicy::owned)));
  }
}

TEST_F(GradientPolicyTest, OneGradientOfSeveralParametersIsEachOnesOwn) {
  torch::nn::Module none;
  OffloadEngine engine(none, Options(device));
  const at::Tensor a = rows(7, device).requires_grad_(true);
  const at::Tensor b = rows(8, device).requires_grad_(true);
  const at::Tensor c = rows(9, device).slice(0, 0, 1).clone().requires_grad_(true);
  const TensorFunction body = [=](const Tensors& in) { return Tensors{in[0] + a + b, (in[0] * c).sum()}; };
  const TensorFunction graphed = make_graphed_callables(engine, {Callable("sums", owning(body))}, {{input(0)}},
                                                        GraphOptions().gradients("sums", GradientPolicy::owned))[0];
  const auto run = [&](const TensorFunction& function) {
    StepTensors all;
    std::vector<at::Tensor> held;
    for (std::int64_t s = 0; s < 4; ++s) {
      const at::Tensor x = input(s);
      const Tensors out = function({x});
      ((out[0] * rows(s, device, 1)).sum() + out[1] * 3).backward();
      for (const at::Tensor& tensor : {a, b, c}) {
        if (s == 2) {
          tensor.mutable_grad().mul_(2);  // the gradients of a and b are no aliases
        }
        held.push_back(tensor.grad());
        tensor.mutable_grad() = at::Tensor();
      }
      all.emplace_back("input", x.grad());
    }
    for (const at::Tensor& tensor : held) {
      all.emplace_back("held", tensor);
    }
    return all;
  };
  EXPECT_TRUE(same(run(graphed), run(body)));
}

TEST_F(GradientPolicyTest, OneTransposedGradientOfSeveralParametersIsEachOnesOwn) {
  torch::nn::Module none;
  OffloadEngine engine(none, Options(device));
  const at::Tensor a = rows(7, device).t().detach().requires_grad_(true);
  const at::Tensor b = rows(8, device).t().detach().requires_grad_(true);
  const TensorFunction body = [=](const Tensors& in) { return Tensors{in[0] + a.t() + b.t()}; };
  const TensorFunction graphed = make_graphed_callables(engine, {Callable("sums", owning(body))}, {{input(0)}},
                                                        GraphOptions().gradients("sums", GradientPolicy::owned))[0];
  // In plain training, the gradients of a and b are views of one memory.
  const auto run = [&](const TensorFunction& function, bool writes) {
    StepTensors all;
    for (std::int64_t s = 0; s < 4; ++s) {
      const at::Tensor x = input(s);
      (function({x})[0] * rows(s, device, 1)).sum().backward();
      if (writes) {
        a.mutable_grad().mul_(2);
      }
      all.emplace_back("b", b.grad().clone());
      all.emplace_back("input", x.grad().clone());
      a.mutable_grad() = b.mutable_grad() = at::Tensor();
    }
    return all;
  };
  EXPECT_TRUE(same(run(graphed, true), run(body, false)));
}

TEST_F(GradientPolicyTest, OutputsThatLeadToNoneGiveNone) {
  torch::nn::Module none;
  OffloadEngine engine(none, Options(device));
  const at::Tensor a = rows(7, device).requires_grad_(true);
  const at::Tensor b = rows(8, device).requires_grad_(true);
  const TensorFunction body = [=](const Tensors& in) { return Tensors{in[0] * a, in[0] * b}; };
  const TensorFunction graphed =
      make_graphed_callables(engine, {Callable("two", owning(body))}, {{input(0)}}, all_by(GradientPolicy::owned))[0];
  for (std::int64_t s = 0; s < 4; ++s) {
    graphed({input(s)})[static_cast<std::size_t>(s % 2)].sum().backward();
    EXPECT_EQ(a.grad().defined(), s % 2 == 0);
    EXPECT_EQ(b.grad().defined(), s % 2 == 1);
    EXPECT_TRUE(at::equal((s % 2 == 0 ? a : b).grad().cpu(), rows(s, device).cpu()));
    a.mutable_grad() = b.mutable_grad() = at::Tensor();
  }
}

TEST_F(GradientPolicyTest, MixedPoliciesAreVerified) {
  StackTwins::capture(Options(device).verify_replays(4), GraphOptions()
                                                             .gradients("**", GradientPolicy::owned)
                                                             .gradients("*.fc1", GradientPolicy::accumulated)
                                                             .gradients("*.fc2", GradientPolicy::cloned));
  for (std::int64_t s = 0; s < 14; ++s) {
    in_step(&*engine, [&] { expect_same_backward(s); });
  }
  EXPECT_GE(engine->report().verified_backwards, 12);
}

/// A weight that may be transposed in place of itself.
class SquareGradientTest : public conformance::ConformanceTest {
 protected:
  static Tensors product(torch::nn::LinearImpl& linear, const Tensors& in) { return {linear.forward(in[0]).sum()}; }
  void transpose_gradient() { linear_->weight.mutable_grad() = linear_->weight.grad().t(); }

  torch::nn::Linear linear_ = [&] {
    torch::nn::Linear linear(torch::nn::LinearOptions(8, 8).bias(false));
    linear->to(device_);
    return linear;
  }();
  OffloadEngine engine_{*linear_, Options(device_)};
  at::Tensor input_ = at::arange(32, at::kFloat).reshape({4, 8}).to(device_);
};

TEST_F(SquareGradientTest, ATransposedAccumulatedOneIsNoLongerTheGraphs) {
  const auto graphed = make_graphed_callables(engine_, {Callable("linear", product, linear_)}, {{input_}},
                                              all_by(GradientPolicy::accumulated));
  graphed[0]({input_})[0].backward();
  transpose_gradient();
  const at::Tensor loss = graphed[0]({input_})[0];
  EXPECT_THROWS(UsageError, "was replaced by another tensor", loss.backward());
}

TEST_F(SquareGradientTest, ATransposedOneOfAWholeStepIsNoLongerTheGraphs) {
  const GraphedStep step =
      make_graphed_step(engine_, Callable("step", product, linear_), {{input_}}, StepOptions().accumulate(true));
  (void)step({{input_}});
  transpose_gradient();
  EXPECT_THROWS(UsageError, "is not the tensor that its graph adds into", (void)step({{input_}}));
}

}  // namespace
}  // namespace sidestream::testing_model
