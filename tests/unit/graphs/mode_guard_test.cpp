// A capture runs in the modes that the recorded call had, and replays in no others.
#include <memory>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include "autocast_region.h"
#include "expect_throws.h"
#include "guard_models.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "warnings.h"

namespace sidestream::testing_model {
namespace {

class ModeGuardTest : public testing::Test {
 protected:
  [[nodiscard]] Options options() const { return Options(device_).min_bytes(64).graph("**").offload("parts.*"); }

  void train(PartModel& model, std::int64_t s) const {
    model.forward(part_input(model, s, device_)).square().mean().backward();
  }
  [[nodiscard]] Twins<PartModel>::Act train() const {
    return [this](PartModel& model, std::int64_t s) { train(model, s); };
  }

  c10::Device device_ = find_device("sim");
};

/// What surrounds the step that captures.
enum class Around { eval, no_grad, inference, autocast, default_dtype };

class CapturingStepTest : public ModeGuardTest, public testing::WithParamInterface<Around> {};

TEST_P(CapturingStepTest, DoesNotLendItsModesToTheCapture) {
  Twins<PartModel> twins(options());
  twins.expect_plain(0, 1, train());
  const auto validate = [&](PartModel& model, OffloadEngine* engine) {
    if (GetParam() == Around::eval) {
      model.eval();
    }
    {
      const at::AutoGradMode grad_mode(GetParam() != Around::no_grad);
      std::unique_ptr<c10::InferenceMode> inference;
      std::unique_ptr<AutocastRegion> autocast;
      if (GetParam() == Around::inference) {
        inference = std::make_unique<c10::InferenceMode>();
      } else if (GetParam() == Around::autocast) {
        autocast = std::make_unique<AutocastRegion>(device_.type());
      } else if (GetParam() == Around::default_dtype) {
        c10::set_default_dtype(caffe2::TypeMeta::Make<double>());
      }
      in_step(engine, [&] {
        const at::AutoGradMode no_grad_inside(false);
        (void)model.forward(part_input(model, 90, device_));
      });
      c10::set_default_dtype(caffe2::TypeMeta::Make<float>());
    }
    model.train();
  };
  torch::manual_seed(3);
  validate(*twins.mine, twins.engine.get());
  torch::manual_seed(3);
  validate(*twins.plain, nullptr);
  EXPECT_EQ(twins.captures(), 6) << "the step of validation has captured";
  twins.expect_plain(1, 4, train());
  EXPECT_EQ(twins.replays(), 6);
  EXPECT_EQ(twins.captures(), 6) << "and what it captured replays";
}

INSTANTIATE_TEST_SUITE_P(Modes, CapturingStepTest,
                         testing::Values(Around::eval, Around::no_grad, Around::inference, Around::autocast,
                                         Around::default_dtype));

TEST_F(ModeGuardTest, CallablesAreCapturedWithGradientsWhateverSurroundsThem) {
  for (const bool inference : {false, true}) {
    Twins<PartModel> twins(Options(device_).min_bytes(64));
    const at::Tensor sample = part_input(*twins.mine, 77, device_);
    std::vector<GraphedCallable> graphed;
    {
      const c10::InferenceMode inference_mode(inference);
      const at::NoGradGuard no_grad;
      graphed = make_graphed_callables(*twins.engine, {part_callable(*twins.mine, 0)}, {{sample}});
    }
    twins.expect_plain(0, 3, [&](PartModel& model, std::int64_t s) {
      const at::Tensor x = part_input(model, s, device_);
      const at::Tensor y = &model == twins.mine.get() ? graphed[0]({x})[0] : model.part(0).forward(x);
      y.square().mean().backward();
    });
  }
}

TEST_F(ModeGuardTest, AnomalyModeLetsCapturesBe) {
  Twins<PartModel> twins(options());
  ExpectedWarnings warnings;  // LibTorch calls it slow
  const torch::autograd::DetectAnomalyGuard looking_for_nan;
  twins.expect_plain(0, 3, train());
  EXPECT_GT(twins.replays(), 0);
  EXPECT_TRUE(torch::autograd::AnomalyMode::is_enabled());
  EXPECT_TRUE(torch::autograd::AnomalyMode::should_check_nan());
}

TEST_F(ModeGuardTest, CallsInInferenceModeRunEagerly) {
  Twins<PartModel> twins(options());
  twins.expect_plain(0, 2, train());
  {
    const c10::InferenceMode inference;
    const at::AutoGradMode grad(true);
    const auto step = twins.engine->step();
    (void)twins.mine->forward(part_input(*twins.mine, 9, device_));
  }
  EXPECT_EQ(twins.replays(), 0);
  torch::manual_seed(4);
  twins.plain->forward(part_input(*twins.plain, 9, device_)).detach();
  twins.both([](PartModel& model) {
    for (at::Tensor& buffer : model.buffers()) {
      buffer.zero_();
    }
  });
  twins.expect_plain(2, 4, train());
  EXPECT_EQ(twins.replays(), 6);
}

TEST_F(ModeGuardTest, FlagsOfSubmodulesArePartOfAVariant) {
  Twins<PartModel> twins(options());
  twins.expect_plain(0, 2, train());
  twins.both([](PartModel& model) {
    model.part(1).drop->eval();
    model.part(2).norm->eval();
  });
  twins.expect_plain(2, 5, train());
  EXPECT_EQ(twins.replays(), 6) << "captured with the flags that the calls had";
  twins.both([](PartModel& model) { model.train(); });
  const std::int64_t captures = twins.captures();
  twins.expect_plain(5, 7, train());
  EXPECT_EQ(twins.captures(), captures) << "the first captures replay again";
  EXPECT_EQ(twins.replays(), 6);
}

TEST_F(ModeGuardTest, AChildInEvalStaysSoWhereTheCapturingStepHasEverythingTraining) {
  Twins<PartModel> twins(options());
  const auto frozen_drop = [&](PartModel& model, std::int64_t s) {
    model.part(1).drop->eval();
    train(model, s);
    model.part(1).drop->train();
  };
  twins.expect_plain(0, 4, frozen_drop);
  EXPECT_EQ(twins.replays(), 6);
  EXPECT_EQ(twins.captures(), 6);
}

TEST_F(ModeGuardTest, APlainFunctionReplaysWithTheModelsFlagsOfItsCaptureOnly) {
  Twins<PartModel> twins(Options(device_).graph("head"));
  const auto act = [&](PartModel& model, std::int64_t s) {
    const at::Tensor x = part_input(model, s, device_).requires_grad_(true);
    const auto head = [](const at::Tensor& in, const std::shared_ptr<Part>& part) { return part->drop(part->fc1(in)); };
    const auto part = std::dynamic_pointer_cast<Part>(model.parts[0]);
    (&model == twins.mine.get() ? call("head", head, x, part) : head(x, part)).sum().backward();
  };
  twins.expect_plain(0, 2, act);
  EXPECT_EQ(twins.replays(), 2);
  twins.both([](PartModel& model) { model.part(0).drop->eval(); });
  twins.expect_plain(2, 5, act);
  EXPECT_EQ(twins.replays(), 2);
  twins.both([](PartModel& model) { model.part(0).drop->train(); });
  twins.expect_plain(5, 6, act);
  EXPECT_EQ(twins.replays(), 2);
}

TEST_F(ModeGuardTest, ACallableRunsEagerlyWhereAChildIsInAnotherMode) {
  Twins<PartModel> twins(Options(device_).min_bytes(64));
  const std::vector<GraphedCallable> graphed =
      make_graphed_callables(*twins.engine, {part_callable(*twins.mine, 0)}, {{part_input(*twins.mine, 77, device_)}});
  const auto act = [&](PartModel& model, std::int64_t s) {
    const at::Tensor x = part_input(model, s, device_);
    (&model == twins.mine.get() ? graphed[0]({x})[0] : model.part(0).forward(x)).square().mean().backward();
  };
  twins.expect_plain(0, 2, act);
  EXPECT_EQ(twins.replays(), 2);
  twins.both([](PartModel& model) { model.part(0).drop->eval(); });
  twins.expect_plain(2, 3, act);
  EXPECT_EQ(twins.replays(), 0);
  twins.both([](PartModel& model) { model.part(0).drop->train(); });
  twins.expect_plain(3, 4, act);
  EXPECT_EQ(twins.replays(), 2);
}

/// A module that does as the switches of the process say.
class Switched : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) {
    const at::Context& context = at::globalContext();
    double factor = context.deterministicAlgorithms() ? 2 : 1;
    factor += context.deterministicAlgorithmsWarnOnly() ? 0.5 : 0;
    factor *= context.userEnabledMathSDP() ? 1 : 3;
    factor *= context.userEnabledCuDNN() ? 1 : 5;
    factor *= context.float32Precision(at::Float32Backend::MKLDNN, at::Float32Op::MATMUL) == at::Float32Precision::BF16
                  ? 7
                  : 1;
    factor *= c10::get_default_dtype_as_scalartype() == at::kDouble ? 11 : 1;
    return x * weight_ * factor;
  }

 private:
  at::Tensor weight_ = register_parameter("weight", at::ones({4}) * 0.3);
};
using SwitchedModel = OnePart<Switched>;

struct Switch {
  const char* name;
  void (*set)(bool on);
};

class ProcessSwitchTest : public ModeGuardTest, public testing::WithParamInterface<Switch> {
 protected:
  void TearDown() override { GetParam().set(false); }
  [[nodiscard]] Twins<SwitchedModel>::Act act(bool on) const {
    return [this, on](SwitchedModel& model, std::int64_t s) {
      if (on) {
        GetParam().set(true);
      }
      auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(s));
      call(model.part.get(), at::randn({4}, generator, at::kFloat).to(device_)).sum().backward();
      if (on) {
        GetParam().set(false);
      }
    };
  }
};

TEST_P(ProcessSwitchTest, IsPartOfAVariant) {
  Twins<SwitchedModel> twins(Options(device_).graph("part"));
  twins.expect_plain(0, 2, act(false));
  GetParam().set(true);
  twins.expect_plain(2, 5, act(false));
  EXPECT_EQ(twins.replays(), 2);
  EXPECT_EQ(twins.captures(), 4);
  GetParam().set(false);
  twins.expect_plain(5, 7, act(false));
  EXPECT_EQ(twins.replays(), 2);
  EXPECT_EQ(twins.captures(), 4);
}

TEST_P(ProcessSwitchTest, IsSetForTheCaptureOfACallThatHadItSet) {
  Twins<SwitchedModel> twins(Options(device_).graph("part"));
  twins.expect_plain(0, 4, act(true));
  EXPECT_EQ(twins.replays(), 2);
  EXPECT_EQ(twins.captures(), 2);
  twins.expect_plain(4, 7, act(false));
  EXPECT_EQ(twins.captures(), 4);
}

TEST_P(ProcessSwitchTest, OfAnotherStateRefusesACallableByName) {
  Twins<SwitchedModel> twins{Options(device_)};
  const std::vector<GraphedCallable> graphed = make_graphed_callables(
      *twins.engine,
      {Callable(
          "part", [](Switched& part, const Tensors& in) { return Tensors{part.forward(in[0])}; }, twins.mine->part)},
      {{at::ones({4}).to(device_)}});
  GetParam().set(true);
  EXPECT_THROWS(UsageError, "\"part\": the global switches", (void)graphed[0]({at::ones({4}, at::kFloat).to(device_)}));
}

TEST_P(ProcessSwitchTest, ChangedBetweenForwardAndBackwardIsNamed) {
  Twins<SwitchedModel> twins(Options(device_).graph("part"));
  twins.expect_plain(0, 2, act(false));
  {
    const auto step = twins.engine->step();
    const at::Tensor y = call(twins.mine->part.get(), at::ones({4}).to(device_)).sum();
    GetParam().set(true);
    EXPECT_THROWS(UsageError, "\"part\": its backward runs in another state", y.backward());
    GetParam().set(false);
  }
  twins.expect_plain(2, 4, act(false));
}

INSTANTIATE_TEST_SUITE_P(
    Switches, ProcessSwitchTest,
    testing::Values(Switch{"deterministic",
                           [](bool on) { at::globalContext().setDeterministicAlgorithms(on, /*warn_only=*/false); }},
                    Switch{"warn_only", [](bool on) { at::globalContext().setDeterministicAlgorithms(on, on); }},
                    Switch{"math_attention", [](bool on) { at::globalContext().setSDPUseMath(!on); }},
                    Switch{"cudnn", [](bool on) { at::globalContext().setUserEnabledCuDNN(!on); }},
                    Switch{"float32_precision",
                           [](bool on) { at::globalContext().setFloat32MatmulPrecision(on ? "medium" : "highest"); }},
                    Switch{"default_dtype",
                           [](bool on) {
                             c10::set_default_dtype(on ? caffe2::TypeMeta::Make<double>()
                                                       : caffe2::TypeMeta::Make<float>());
                           }}),
    [](const auto& info) { return std::string(info.param.name); });

/// Two products of one input: their gradients are summed before or after autocast's cast.
class Branches : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, a_) * at::linear(x, b_) + at::linear(x, a_); }

 private:
  at::Tensor a_ = register_parameter("a", at::randn({8, 8}) * 0.3);
  at::Tensor b_ = register_parameter("b", at::randn({8, 8}) * 0.3);
};
class BranchModel : public torch::nn::Module {
 public:
  BranchModel() {
    torch::manual_seed(31);
    first = register_module("first", std::make_shared<Branches>());
    second = register_module("second", std::make_shared<Branches>());
    input = register_parameter("input", at::randn({5, 8}));
  }
  std::shared_ptr<Branches> first, second;
  at::Tensor input;
};

class AutocastGuardTest : public ModeGuardTest {
 protected:
  /// `leaf`: the first call's input is one.
  [[nodiscard]] Twins<BranchModel>::Act act(bool leaf, bool cached = true) const {
    return [this, leaf, cached](BranchModel& model, std::int64_t s) {
      at::Tensor loss;
      {
        const AutocastRegion autocast(device_.type(), cached);
        const at::Tensor x = leaf ? model.input : model.input * (0.1 * static_cast<double>(s + 1));
        loss = call(model.second.get(), call(model.first.get(), x).to(at::kFloat)).to(at::kFloat).mean();
      }
      loss.backward();
    };
  }
};

TEST_F(AutocastGuardTest, BranchesMeetAsInPlainTraining) {
  for (const bool leaf : {false, true}) {
    for (const bool cached : {false, true}) {
      Twins<BranchModel> twins(Options(device_).graph("first,second"));
      twins.expect_plain(0, 4, act(leaf, cached));
      EXPECT_EQ(twins.replays(), 4);
      EXPECT_EQ(twins.captures(), 4);
    }
  }
}

TEST_F(AutocastGuardTest, ALeafIsAnotherVariantThanANonLeaf) {
  Twins<BranchModel> twins(Options(device_).graph("first,second"));
  twins.expect_plain(0, 3, act(false));
  twins.expect_plain(3, 6, act(true));
  EXPECT_EQ(twins.replays(), 4);
  twins.expect_plain(6, 7, act(false));
  EXPECT_EQ(twins.replays(), 4);
}

TEST_F(AutocastGuardTest, TheCacheSwitchIsPartOfAVariant) {
  Twins<BranchModel> twins(Options(device_).graph("first,second"));
  twins.expect_plain(0, 3, act(true, true));
  twins.expect_plain(3, 6, act(true, false));
  EXPECT_EQ(twins.replays(), 4);
  twins.expect_plain(6, 7, act(true, true));
  EXPECT_EQ(twins.replays(), 4);
}

/// Autocast of its own: what surrounds the call says nothing of it.
class OwnAutocast : public Branches {
 public:
  at::Tensor forward(const at::Tensor& x) {
    const AutocastRegion autocast(x.device().type());
    return Branches::forward(x).to(at::kFloat);
  }
};
class OwnAutocastModel : public torch::nn::Module {
 public:
  OwnAutocastModel() {
    torch::manual_seed(31);
    part = register_module("part", std::make_shared<OwnAutocast>());
    input = register_parameter("input", at::randn({5, 8}));
  }
  std::shared_ptr<OwnAutocast> part;
  at::Tensor input;
};

TEST_F(AutocastGuardTest, BranchesMeetWhereTheModuleCastsItself) {
  Twins<OwnAutocastModel> twins(Options(device_).graph("part"));
  const auto act = [&](bool leaf) {
    return [leaf](OwnAutocastModel& model, std::int64_t s) {
      const at::Tensor x = leaf ? model.input : model.input * (0.1 * static_cast<double>(s + 1));
      call(model.part.get(), x).mean().backward();
    };
  };
  twins.expect_plain(0, 3, act(false));
  EXPECT_EQ(twins.replays(), 2);
  twins.expect_plain(3, 6, act(true));
  EXPECT_EQ(twins.replays(), 2);
}

TEST_F(AutocastGuardTest, ABackwardInsideTheRegionIsCapturedSo) {
  Twins<BranchModel> twins(Options(device_).graph("first,second"));
  const auto act = [&](BranchModel& model, std::int64_t s) {
    const AutocastRegion autocast(device_.type());
    const at::Tensor x = model.input * (0.1 * static_cast<double>(s + 1));
    call(model.second.get(), call(model.first.get(), x).to(at::kFloat)).to(at::kFloat).mean().backward();
  };
  twins.expect_plain(0, 4, act);
  EXPECT_EQ(twins.replays(), 4);
}

TEST_F(AutocastGuardTest, ABackwardInAnotherStateIsNamed) {
  Twins<BranchModel> twins(Options(device_).graph("first,second"));
  twins.expect_plain(0, 3, act(false));
  {
    const auto step = twins.engine->step();
    const AutocastRegion autocast(device_.type());
    const at::Tensor loss = call(twins.mine->first.get(), twins.mine->input * 2.0).to(at::kFloat).sum();
    EXPECT_THROWS(UsageError, "outside of the autocast region", loss.backward());
  }
  twins.expect_plain(3, 5, act(false));
}

}  // namespace
}  // namespace sidestream::testing_model
