// What a capture froze of the weights is compared before each replay, and from forward to backward.
#include <cstdint>
#include <thread>

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "expect_throws.h"
#include "guard_models.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"

namespace sidestream::testing_model {
namespace {

class ParameterGuardTest : public testing::Test {
 protected:
  [[nodiscard]] Options options(const GraphOptions& graph = {}) const {
    return Options(device_).min_bytes(64).graph("**").offload("**").graph_options(graph);
  }
  void train(PartModel& model, std::int64_t s) const {
    const at::Tensor x = part_input(model, s, device_);
    model.forward(x.to(model.part(0).fc1->weight.scalar_type())).square().mean().backward();
  }
  [[nodiscard]] Twins<PartModel>::Act train() const {
    return [this](PartModel& model, std::int64_t s) { train(model, s); };
  }
  [[nodiscard]] std::vector<GraphedCallable> graph(Twins<PartModel>& twins, const GraphOptions& graph = {}) const {
    return make_graphed_callables(*twins.engine, {part_callable(*twins.mine, 0)},
                                  {{part_input(*twins.mine, 77, device_)}}, graph);
  }
  [[nodiscard]] Twins<PartModel>::Act callable(Twins<PartModel>& twins,
                                               const std::vector<GraphedCallable>& graphed) const {
    return [&twins, &graphed, this](PartModel& model, std::int64_t s) {
      const at::Tensor x = part_input(model, s, device_);
      (&model == twins.mine.get() ? graphed[0]({x})[0] : model.part(0).forward(x)).square().mean().backward();
    };
  }

  c10::Device device_ = find_device("sim");
};

/// One parameter under two names, another inside of a submodule that is registered twice.
class Doubled : public torch::nn::Module {
 public:
  Doubled() {
    torch::manual_seed(41);
    weight = register_parameter("weight", at::randn({8, 8}));
    register_parameter("again", weight);
    linear = register_module("linear", torch::nn::Linear(8, 8));
    register_module("same", linear);
  }
  at::Tensor forward(const at::Tensor& x) { return linear(at::linear(x, weight).tanh()); }
  at::Tensor weight;
  torch::nn::Linear linear{nullptr};
};
using DoubledModel = OnePart<Doubled>;

TEST_F(ParameterGuardTest, AParameterUnderTwoNamesCountsOnce) {
  for (const bool in_graph : {false, true}) {
    Twins<DoubledModel> twins(
        options(GraphOptions().gradients("**", in_graph ? GradientPolicy::accumulated : GradientPolicy::cloned)));
    int hooks = 0;
    if (!in_graph) {
      twins.both([&](DoubledModel& model) {
        model.part->weight.register_hook([&hooks](const at::Tensor& grad) {
          ++hooks;
          return grad * 3;
        });
      });
    }
    const auto act = [&](DoubledModel& model, std::int64_t s) {
      call(model.part.get(), at::full({5, 8}, 0.1 * static_cast<double>(s + 1), at::kFloat).to(device_))
          .sum()
          .backward();
    };
    twins.expect_plain(0, 4, act);
    EXPECT_EQ(twins.replays(), 2);
    EXPECT_EQ(hooks, in_graph ? 0 : 8);
  }
}

TEST_F(ParameterGuardTest, FrozenAndTrainedAgainAsInPlainTraining) {
  Twins<PartModel> twins(options());
  twins.expect_plain(0, 3, train());
  const auto require = [&](bool on) {
    twins.both([&](PartModel& model) {
      model.part(1).fc1->weight.requires_grad_(on);
      model.part(0).fc2->bias.requires_grad_(on);
    });
  };
  require(false);
  twins.expect_plain(3, 6, train());
  EXPECT_EQ(twins.replays(), 6);
  require(true);
  twins.expect_plain(6, 8, train());
  EXPECT_EQ(twins.replays(), 6);
  const std::int64_t captures = twins.captures();
  require(false);
  twins.expect_plain(8, 10, train());
  EXPECT_EQ(twins.captures(), captures) << "both forms replay";
}

TEST_F(ParameterGuardTest, ADiscriminatorThatIsFrozenHalfOfEachStep) {
  Twins<PartModel> twins(options());
  const auto act = [&](PartModel& model, std::int64_t s) {
    for (at::Tensor& parameter : model.part(1).parameters()) {
      parameter.requires_grad_(true);
    }
    call(&model.part(1), part_input(model, 20 + s, device_)).square().mean().backward();
    for (at::Tensor& parameter : model.part(1).parameters()) {
      parameter.requires_grad_(false);
    }
    call(&model.part(1), call(&model.part(0), part_input(model, s, device_))).mean().backward();
    for (at::Tensor& parameter : model.part(1).parameters()) {
      parameter.requires_grad_(true);
    }
  };
  twins.expect_plain(0, 5, act);
  EXPECT_EQ(twins.replays(), 6);
  EXPECT_EQ(twins.captures(), 6);
}

TEST_F(ParameterGuardTest, AWholeModelFrozenAndTrainedAgain) {
  Twins<PartModel> twins(options());
  const auto act = [&](PartModel& model, std::int64_t s) {
    const at::Tensor x = part_input(model, s, device_).requires_grad_(true);
    model.forward(x).square().mean().backward();
  };
  twins.expect_plain(0, 2, act);
  for (const bool on : {false, true, false}) {
    twins.both([&](PartModel& model) {
      for (at::Tensor& parameter : model.parameters()) {
        parameter.requires_grad_(on);
      }
    });
    twins.expect_plain(2, 5, act);
    EXPECT_EQ(twins.replays(), 6);
  }
}

TEST_F(ParameterGuardTest, AFrozenCallableIsCapturedAgain) {
  Twins<PartModel> twins(Options(device_).min_bytes(64));
  const auto graphed = graph(twins);
  const auto act = callable(twins, graphed);
  twins.expect_plain(0, 2, act);
  for (const bool on : {false, true}) {
    twins.both([&](PartModel& model) { model.part(0).fc1->weight.requires_grad_(on); });
    twins.expect_plain(2, 4, act);
    EXPECT_EQ(twins.replays(), 2);
  }
  Twins<PartModel> refusing(Options(device_).min_bytes(64));
  const auto refused = graph(refusing, GraphOptions().on_relocated_weights(OnRelocatedWeights::error));
  refusing.mine->part(0).fc1->weight.requires_grad_(false);
  EXPECT_THROWS(UsageError, "\"fc1.weight\" is frozen, was trained",
                (void)refused[0]({part_input(*refusing.mine, 1, device_)}));
}

/// Changes after which the call is another one.
struct Change {
  const char* name;
  void (*apply)(PartModel& model);
};
class ChangedModelTest : public ParameterGuardTest, public testing::WithParamInterface<Change> {};

TEST_P(ChangedModelTest, IsRecordedAndCapturedAnew) {
  const std::pair<OnNewArguments, GradientPolicy> choices[] = {{OnNewArguments::capture, GradientPolicy::cloned},
                                                               {OnNewArguments::eager, GradientPolicy::accumulated}};
  for (const auto& [option, policy] : choices) {
    Twins<PartModel> twins(
        options(GraphOptions().gradients("**", policy)).call_options(CallOptions().on_new_arguments(option)));
    twins.expect_plain(0, 3, train());
    EXPECT_EQ(twins.engine->report().recaptures, 0);
    torch::manual_seed(51);
    GetParam().apply(*twins.mine);
    torch::manual_seed(51);
    GetParam().apply(*twins.plain);
    twins.expect_plain(3, 7, train());
    EXPECT_EQ(twins.replays(), 6) << "captured again";
    EXPECT_GT(twins.engine->report().recaptures, 0);
  }
}

TEST_P(ChangedModelTest, InTheMiddleOfAStepRunsPlainly) {
  for (const GradientPolicy policy : {GradientPolicy::cloned, GradientPolicy::accumulated}) {
    Twins<PartModel> twins(options(GraphOptions().gradients("**", policy)));
    twins.expect_plain(0, 3, train());
    twins.expect_plain(3, [&](PartModel& model, std::int64_t s) {
      train(model, s);
      model.zero_grad();
      torch::manual_seed(51);
      GetParam().apply(model);
      train(model, s + 10);
    });
    twins.expect_plain(4, 7, train());
    EXPECT_EQ(twins.replays(), 6);
  }
}

TEST_P(ChangedModelTest, BeforeTheCaptureIsRecordedAnew) {
  for (const OnNewArguments option : {OnNewArguments::capture, OnNewArguments::eager}) {
    Twins<PartModel> twins(options().call_options(CallOptions().on_new_arguments(option)));
    twins.expect_plain(0, 1, train());
    torch::manual_seed(51);
    GetParam().apply(*twins.mine);
    torch::manual_seed(51);
    GetParam().apply(*twins.plain);
    twins.expect_plain(1, 4, train());
    EXPECT_EQ(twins.replays(), 6);
  }
}

TEST_P(ChangedModelTest, IsAnErrorByOption) {
  Twins<PartModel> twins(options(GraphOptions().on_relocated_weights(OnRelocatedWeights::error)));
  twins.expect_plain(0, 3, train());
  GetParam().apply(*twins.mine);
  EXPECT_THROWS(UsageError, "were relocated", (void)twins.engine->step());
}

INSTANTIATE_TEST_SUITE_P(
    Changes, ChangedModelTest,
    testing::Values(Change{"to_double", [](PartModel& model) { model.to(at::kDouble); }},
                    Change{"a_parameter_registered_anew", [](PartModel& model) { model.part(1).renew_scale(); }},
                    Change{"another_layout",
                           [](PartModel& model) {
                             at::Tensor& weight = model.part(1).fc1->weight;
                             weight.set_data(weight.detach().t().contiguous().t());
                           }},
                    Change{"another_shape",
                           [](PartModel& model) {
                             Part& part = model.part(1);
                             for (at::Tensor tensor : {part.fc1->bias, part.norm->weight, part.norm->bias,
                                                       part.norm->running_mean, part.norm->running_var}) {
                               tensor.set_data(tensor.detach().repeat({2}));
                             }
                             part.fc1->weight.set_data(part.fc1->weight.detach().repeat({2, 1}));
                             part.fc2->weight.set_data(part.fc2->weight.detach().repeat({1, 2}));
                           }},
                    Change{"a_submodule_in_anothers_place",
                           [](PartModel& model) {
                             auto other = torch::nn::Linear(2 * model.width(), model.width());
                             other->to(model.part(0).fc2->weight.device());
                             model.part(0).fc2 = model.part(0).replace_module("fc2", other);
                           }},
                    Change{"a_further_parameter",
                           [](PartModel& model) {
                             model.part(2).register_parameter(
                                 "further", at::ones({2}, at::kFloat).to(model.part(2).fc1->weight.device()));
                           }},
                    Change{
                        "a_further_submodule",
                        [](PartModel& model) { model.part(2).register_module("further", torch::nn::Dropout(0.1)); }}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_F(ParameterGuardTest, ABlockInAnothersPlaceIsCaptured) {
  Twins<PartModel> twins(options());
  twins.expect_plain(0, 3, train());
  twins.both([&](PartModel& model) {
    torch::manual_seed(53);
    auto other = std::make_shared<Part>(model.width());
    other->to(device_);
    torch::nn::ModuleList parts;
    parts->push_back(model.parts[0]);
    parts->push_back(other);
    parts->push_back(model.parts[2]);
    model.parts = model.replace_module("parts", parts);
  });
  twins.expect_plain(3, 6, train());
  EXPECT_EQ(twins.replays(), 6);
  EXPECT_GT(twins.engine->report().recaptures, 0);
}

TEST_F(ParameterGuardTest, AwayToTheHostAndBack) {
  Twins<PartModel> twins(options());
  twins.expect_plain(0, 3, train());
  twins.both([&](PartModel& model) {
    model.to(at::kCPU);
    model.to(device_);
  });
  twins.expect_plain(3, 6, train());
  EXPECT_EQ(twins.replays(), 6);
}

TEST_F(ParameterGuardTest, ACallableOfAnotherDtypeIsRefusedByName) {
  Twins<PartModel> twins(Options(device_).min_bytes(64));
  const auto graphed = graph(twins);
  twins.expect_plain(0, 2, callable(twins, graphed));
  twins.mine->part(0).fc1->to(at::kDouble);
  EXPECT_THROWS(UsageError, "\"part0\": \"fc1.weight\" is Double, was Float",
                (void)graphed[0]({part_input(*twins.mine, 1, device_)}));
  twins.both([](PartModel& model) { model.part(0).fc1->to(at::kFloat); });
  twins.expect_plain(2, 4, callable(twins, graphed));
}

TEST_F(ParameterGuardTest, AWeightChangedInPlaceBeforeItsBackwardIsAnErrorAsInPlainTraining) {
  Twins<PartModel> twins(options());
  twins.expect_plain(0, 3, train());
  const auto change = [&](PartModel& model, const at::Tensor& weight) {
    const at::Tensor loss = model.forward(part_input(model, 4, device_)).square().mean();
    {
      const at::NoGradGuard no_grad;
      weight.mul_(1);
    }
    loss.backward();
  };
  const auto message = [&](PartModel& model, OffloadEngine* engine, const at::Tensor& weight) {
    return message_of<UsageError>([&] { in_step(engine, [&] { change(model, weight); }); });
  };
  const std::string mine = message(*twins.mine, twins.engine.get(), twins.mine->part(1).fc2->weight);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "modified by an inplace operation", mine);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "\"parts.1\": \"fc2.weight\"", mine);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "modified by an inplace operation",
                      message(*twins.plain, nullptr, twins.plain->part(1).fc2->weight));
  twins.both([](PartModel& model) {
    for (at::Tensor& buffer : model.buffers()) {
      buffer.zero_();
    }
  });
  twins.expect_plain(4, 6, train());
  twins.expect_plain(6, [&](PartModel& model, std::int64_t /*s*/) { change(model, model.part(1).fc2->bias); });
  EXPECT_EQ(twins.replays(), 6) << "no backward reads a bias";
}

/// A layer whose backward reads a buffer.
class Masked : public torch::nn::Module {
 public:
  Masked() {
    torch::manual_seed(47);
    linear = register_module("linear", torch::nn::Linear(8, 8));
    mask = register_buffer("mask", at::linspace(0.1, 1, 8, at::kFloat));
  }
  at::Tensor forward(const at::Tensor& x) { return linear(x) * mask; }
  torch::nn::Linear linear{nullptr};
  at::Tensor mask;
};
using MaskedModel = OnePart<Masked>;

TEST_F(ParameterGuardTest, ABufferChangedInPlaceBeforeItsBackwardIsNamed) {
  Twins<MaskedModel> twins(options());
  const auto loss_of = [&](MaskedModel& model) {
    return call(model.part.get(), at::ones({5, 8}, at::kFloat).to(device_)).sum();
  };
  twins.expect_plain(0, 3, [&](MaskedModel& model, std::int64_t /*s*/) { loss_of(model).backward(); });
  EXPECT_EQ(twins.replays(), 2);
  const auto step = twins.engine->step();
  const at::Tensor loss = loss_of(*twins.mine);
  twins.mine->part->mask.mul_(1);
  EXPECT_THROWS(UsageError, "graphed call \"part\": \"mask\", which its backward needs", loss.backward());
}

TEST_F(ParameterGuardTest, AWeightExchangedBeforeItsBackwardIsNamed) {
  Twins<PartModel> twins(options());
  twins.expect_plain(0, 3, train());
  {
    const auto step = twins.engine->step();
    const at::Tensor loss = twins.mine->forward(part_input(*twins.mine, 4, device_)).square().mean();
    at::Tensor& weight = twins.mine->part(2).fc1->weight;
    weight.set_data(weight.detach().clone());
    EXPECT_THROWS(UsageError, "\"parts.2\": since its forward, \"fc1.weight\" lies in other memory; its backward",
                  loss.backward());
  }
  twins.both([](PartModel& model) {
    for (at::Tensor& buffer : model.buffers()) {
      buffer.zero_();
    }
  });
  twins.expect_plain(4, 6, train());
}

/// A weight that is computed from others outside of the call.
class Computed : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, effective); }
  at::Tensor effective;
};
class ComputedModel : public OnePart<Computed> {
 public:
  ComputedModel() {
    torch::manual_seed(61);
    direction = register_parameter("direction", at::randn({8, 8}));
    gain = register_parameter("gain", at::randn({8, 1}));
  }
  void run(std::int64_t s, c10::Device device) {
    call(part.get(), at::full({5, 8}, 0.1 * static_cast<double>(s + 1), at::kFloat).to(device))
        .square()
        .sum()
        .backward();
  }
  at::Tensor direction, gain;
};

TEST_F(ParameterGuardTest, AWeightThatIsNoLeafIsRefusedByTheCallsName) {
  for (const bool tied : {false, true}) {
    Twins<ComputedModel> twins(options());
    const auto act = [&](ComputedModel& model, std::int64_t s) {
      if (!tied) {
        model.part->effective = model.direction * model.gain;
      } else if (!model.part->effective.defined()) {
        model.part->effective = model.direction.t();
      }
      model.run(s, device_);
    };
    twins.expect_plain(0, 1, act);
    EXPECT_THROWS(UsageError, "graphed call \"part\": it reads a tensor of shape [8, 8] that was computed",
                  (void)twins.engine->step());
    EXPECT_THROWS(UsageError, "pass the tensor as an argument", (void)twins.engine->step());
  }
}

/// Each thread numbers the nodes of autograd that it makes.
void make_nodes(std::uint64_t count) {
  const at::Tensor leaf = at::ones({1}).requires_grad_();
  for (std::uint64_t i = 0; i < count; ++i) {
    (void)(leaf * 2);
  }
}

TEST_F(ParameterGuardTest, AWeightThatAnotherThreadComputesIsRefusedToo) {
  for (const bool ahead : {false, true}) {
    Twins<ComputedModel> twins(options());
    const auto act = [&](ComputedModel& model, std::int64_t s) {
      const std::uint64_t here = at::sequence_number::peek();
      std::thread([&] {
        make_nodes(ahead ? here + 1000 : 0);
        model.part->effective = model.direction * model.gain;
      }).join();
      model.run(s, device_);
    };
    twins.expect_plain(0, 1, act);
    EXPECT_THROWS(UsageError, "it reads a tensor of shape [8, 8] that was computed", (void)twins.engine->step());
  }
}

/// Second derivatives of what it computes.
class Curved : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor at = x.detach().requires_grad_();
    const at::Tensor energy = at::linear(at, weight_).tanh().square().sum();
    const at::Tensor slope = torch::autograd::grad({energy}, {at}, {}, true, true)[0];
    const at::Tensor curve = torch::autograd::grad({slope.square().sum()}, {at}, {}, true, true)[0];
    return curve.square().mean() + energy;
  }

 private:
  at::Tensor weight_ = register_parameter("weight", at::arange(64, at::kFloat).view({8, 8}) * 0.01 - 0.3);
};

TEST_F(ParameterGuardTest, ABackwardInsideOfTheBodyMakesNoWeights) {
  make_nodes(1000);  // more than autograd's thread has made
  Twins<OnePart<Curved>> twins(options());
  twins.expect_plain(0, 4, [&](OnePart<Curved>& model, std::int64_t s) {
    call(model.part.get(), at::full({5, 8}, 0.1 * static_cast<double>(s + 1), at::kFloat).to(device_)).backward();
  });
  EXPECT_EQ(twins.replays(), 2);
}

}  // namespace
}  // namespace sidestream::testing_model
