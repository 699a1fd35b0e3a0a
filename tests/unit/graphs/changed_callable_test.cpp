// Weights of one callable of a set are changed between passes, whichever callable it is: the set is captured again.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include "expect_throws.h"
#include "guard_models.h"
#include "sidestream/bucketed_callables.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"

namespace sidestream::testing_model {
namespace {

constexpr std::size_t kChangedParts = 4;

/// A change of one part, and whether graphs that read it must be captured again.
struct PartChange {
  const char* name;
  std::function<void(Part&)> apply;
  bool captures;
};

void move_away_and_back(Part& part) {
  const at::Tensor held = part.fc1->weight.variable_data();  // so that its memory is not given out again
  part.fc1->to(at::kDouble);
  part.fc1->to(at::kFloat);
}

/// As torch::save and torch::load do, which give each tensor other memory. The memory from before has other values then.
void save_and_load(Part& part) {
  std::stringstream saved;
  {
    torch::serialize::OutputArchive archive;
    part.save(archive);
    archive.save_to(saved);
  }
  {
    const at::NoGradGuard no_grad;
    part.fc1->weight.mul_(2);
  }
  torch::serialize::InputArchive archive;
  archive.load_from(saved);
  part.load(archive);
}

const std::vector<PartChange>& part_changes() {
  static const std::vector<PartChange> changes = {
      {"freeze", [](Part& part) { part.fc1->weight.set_requires_grad(false); }, true},
      {"freeze_all",
       [](Part& part) {
         for (at::Tensor& parameter : part.parameters()) {
           parameter.set_requires_grad(false);
         }
       },
       true},
      {"unfreeze", [](Part& part) { part.fc2->bias.set_requires_grad(true); }, true},  // see ChangedCallableTest
      {"load", save_and_load, true},
      {"load_in_place",
       [](Part& part) {
         const at::NoGradGuard no_grad;
         part.fc1->weight.copy_(part.fc1->weight * 0.5);
         part.fc2->bias.copy_(part.fc2->bias + 0.25);
       },
       false},
      {"set_data", [](Part& part) { part.fc2->weight.set_data(part.fc2->weight.detach().clone()); }, true},
      {"module_to", move_away_and_back, true},
      {"replaced_parameter", [](Part& part) { part.renew_scale(); }, true},
  };
  return changes;
}

/// As a trainer calls them: callables of one shape, or of two.
enum class CapturedAs : std::uint8_t { callables, buckets };

using ChangedPart = std::tuple<std::size_t, std::size_t, CapturedAs>;  // which change, of which part, captured how

class ChangedCallableTest : public testing::TestWithParam<ChangedPart> {
 protected:
  ChangedCallableTest() {
    twins_.both([](PartModel& model) {  // what "unfreeze" trains again
      for (std::size_t i = 0; i < kChangedParts; ++i) {
        model.part(i).fc2->bias.set_requires_grad(false);
      }
    });
    std::vector<Callable> callables;
    for (std::size_t i = 0; i < kChangedParts; ++i) {
      callables.push_back(part_callable(*twins_.mine, i));
    }
    if (std::get<2>(GetParam()) == CapturedAs::callables) {
      for (GraphedCallable& graphed : make_graphed_callables(*twins_.engine, callables, samples(6))) {
        calls_.push_back([graphed](const at::Tensor& h) { return graphed({h})[0]; });
      }
    } else {
      buckets_ = 2;
      for (GraphedCallable& bucketed : make_bucketed_callables(*twins_.engine, callables, {samples(4), samples(6)})) {
        calls_.push_back([bucketed](const at::Tensor& h) { return bucketed({h})[0]; });
      }
    }
  }

  [[nodiscard]] at::Tensor input(std::int64_t s, std::int64_t rows) const {
    return part_input(*twins_.mine, s, device_).narrow(0, 0, rows).clone().requires_grad_(true);
  }
  [[nodiscard]] std::vector<std::vector<Sample>> samples(std::int64_t rows) const {
    std::vector<std::vector<Sample>> all{{input(77, rows)}};
    while (all.size() < kChangedParts) {
      all.push_back({Sample::output_of(static_cast<std::int64_t>(all.size()) - 1)});
    }
    return all;
  }
  /// Steps [first, last), of each bucket by turns: the same as plain training, and all of it replayed.
  void expect_replays(std::int64_t first, std::int64_t last) {
    for (std::int64_t s = first; s < last; ++s) {
      std::vector<at::Tensor> input_gradients;
      twins_.expect_plain(s, [&](PartModel& model, std::int64_t step) {
        const at::Tensor x = input(step, buckets_ == 2 && step % 2 == 0 ? 4 : 6);
        at::Tensor h = x;
        for (std::size_t i = 0; i < kChangedParts; ++i) {
          h = &model == twins_.mine.get() ? calls_[i](h) : model.part(i).forward(h);
        }
        h.square().mean().backward();
        input_gradients.push_back(x.grad().cpu());
      });
      ASSERT_EQ(input_gradients.size(), 2U);
      EXPECT_TRUE(at::equal(input_gradients[0], input_gradients[1])) << "step " << s;
      EXPECT_EQ(twins_.replays(), static_cast<std::int64_t>(2 * kChangedParts)) << "step " << s;
    }
  }

  c10::Device device_ = find_device("sim");
  Twins<PartModel> twins_{Options(device_).min_bytes(64).offload("**"),
                          [] { return std::make_shared<PartModel>(static_cast<std::int64_t>(kChangedParts)); }};
  std::int64_t buckets_ = 1;
  std::vector<std::function<at::Tensor(const at::Tensor&)>> calls_;
};

TEST_P(ChangedCallableTest, GivesThePlainGradients) {
  const PartChange& change = part_changes()[std::get<0>(GetParam())];
  expect_replays(0, 4);
  for (std::int64_t round = 1; round <= 2; ++round) {
    const std::int64_t before = twins_.captures();
    twins_.both([&](PartModel& model) { change.apply(model.part(std::get<1>(GetParam()))); });
    expect_replays(4 * round, 4 * round + 4);
    const bool is_flag = change.name == std::string("freeze") || change.name == std::string("freeze_all") ||
                         change.name == std::string("unfreeze");
    const bool captures = change.captures && (round == 1 || !is_flag);  // a flag is the same the second time
    EXPECT_EQ(twins_.captures() - before, captures ? static_cast<std::int64_t>(2 * kChangedParts) * buckets_ : 0);
  }
  if (change.name == std::string("freeze")) {
    twins_.both([&](PartModel& model) { model.part(std::get<1>(GetParam())).fc1->weight.set_requires_grad(true); });
    expect_replays(12, 16);
  }
  EXPECT_EQ(twins_.engine->report().eager_calls, 0);
}

INSTANTIATE_TEST_SUITE_P(EachAlone, ChangedCallableTest,
                         testing::Combine(testing::Range<std::size_t>(0, part_changes().size()),
                                          testing::Range<std::size_t>(0, kChangedParts),
                                          testing::Values(CapturedAs::callables, CapturedAs::buckets)),
                         [](const auto& info) {
                           return std::string(part_changes()[std::get<0>(info.param)].name) + "_" +
                                  std::to_string(std::get<1>(info.param)) +
                                  (std::get<2>(info.param) == CapturedAs::callables ? "" : "_of_buckets");
                         });

/// Two callables that are not linked.
class ChangedPairTest : public testing::Test {
 protected:
  void capture(const GraphOptions& options) {
    std::vector<Callable> callables;
    std::vector<std::vector<Sample>> samples;
    for (std::size_t i = 0; i < 2; ++i) {
      callables.push_back(part_callable(*twins_.mine, i));
      samples.push_back({x()});
    }
    graphed_ = make_graphed_callables(*twins_.engine, callables, samples, options);
  }
  [[nodiscard]] at::Tensor x() const { return part_input(*twins_.mine, 3, device_).requires_grad_(true); }
  [[nodiscard]] Part& second() const { return twins_.mine->part(1); }

  c10::Device device_ = find_device("sim");
  Twins<PartModel> twins_{Options(device_)};
  std::vector<GraphedCallable> graphed_;
};

TEST_F(ChangedPairTest, AFrozenWeightIsNotCalledRelocatedWhileABackwardIsPending) {
  capture({});
  {
    const at::Tensor y = graphed_[0]({x()})[0];
    second().fc1->weight.set_requires_grad(false);
    const std::string text = message_of<UsageError>([&] { (void)graphed_[1]({x()}); });
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "a parameter was frozen or unfrozen since the capture", text);
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "\"fc1.weight\" is frozen, was trained", text);
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "change weights when no backward is pending", text);
    EXPECT_EQ(text.find("relocated"), std::string::npos) << text;
    y.sum().backward();
  }
  (void)graphed_[1]({x()})[0].sum().backward();
  EXPECT_FALSE(second().fc1->weight.grad().defined());
  EXPECT_TRUE(second().fc2->weight.grad().defined());
}

TEST_F(ChangedPairTest, AReplacedWeightIsNotCalledRelocated) {
  capture(GraphOptions().on_relocated_weights(OnRelocatedWeights::error));
  second().renew_scale();
  const std::string text = message_of<UsageError>([&] { (void)graphed_[1]({x()}); });
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "were replaced since the capture", text);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "make the callables or the step again", text);
  EXPECT_EQ(text.find("pending"), std::string::npos) << text;
}

TEST_F(ChangedPairTest, AReplacedWeightInAnotherModeRunsEagerly) {
  capture({});
  second().renew_scale();
  second().drop->eval();
  graphed_[1]({x()})[0].sum().backward();
  EXPECT_EQ(twins_.engine->report().eager_calls, 1);
  const std::int64_t captured = twins_.captures();
  second().drop->train();
  graphed_[1]({x()})[0].sum().backward();
  EXPECT_EQ(twins_.engine->report().eager_calls, 1);
  EXPECT_EQ(twins_.captures(), captured);
}

TEST_F(ChangedPairTest, AnErrorByOptionComesFromTheChangedCallableAlone) {
  capture(GraphOptions().on_relocated_weights(OnRelocatedWeights::error));
  second().fc1->weight.set_data(second().fc1->weight.detach().clone());
  graphed_[0]({x()})[0].sum().backward();
  EXPECT_THROWS(UsageError, "relocated since the capture", (void)graphed_[1]({x()}));
}

TEST_F(ChangedPairTest, AnotherDtypeOfALaterCallableDoesNotStopTheFirst) {
  capture({});
  const std::int64_t before = twins_.captures();
  second().fc1->to(at::kDouble);
  graphed_[0]({x()})[0].sum().backward();
  EXPECT_EQ(twins_.captures(), before);
  EXPECT_THROWS(UsageError, "\"fc1.weight\" is Double, was Float", (void)graphed_[1]({x()}));
}

TEST_F(ChangedPairTest, ForwardsAloneAreCapturedAgainOnceAPass) {
  capture(GraphOptions().forward_only(true));
  const at::NoGradGuard no_grad;
  const auto both = [&] {
    (void)graphed_[0]({x().detach()});
    (void)graphed_[1]({x().detach()});
  };
  both();
  const std::int64_t before = twins_.captures();
  for (int round = 1; round <= 2; ++round) {
    second().fc1->weight.set_data(second().fc1->weight.detach().clone());
    both();
    both();
    EXPECT_EQ(twins_.captures() - before, 2 * round);
  }
}

/// Two layers, the first of which may be a callable.
class HalfGraphed : public torch::nn::Module {
 public:
  HalfGraphed() {
    torch::manual_seed(43);
    first = register_module("first", torch::nn::Linear(8, 8));
    second = register_module("second", torch::nn::Linear(8, 8));
  }
  at::Tensor forward(const at::Tensor& x) { return second(graphed ? graphed(x) : first(x)).tanh(); }
  torch::nn::Linear first{nullptr}, second{nullptr};
  std::function<at::Tensor(const at::Tensor&)> graphed;
};

/// Replays that are verified, and whether the callable is another engine's than the call.
class CallableInACall : public testing::TestWithParam<std::tuple<std::int64_t, bool>> {};

TEST_P(CallableInACall, IsAPartOfTheCallsGraphAndOfItsVerification) {
  const c10::Device device = find_device("sim");
  Twins<OnePart<HalfGraphed>> twins(
      Options(device).graph("**").offload("**").min_bytes(16).verify_replays(std::get<0>(GetParam())));
  std::optional<OffloadEngine> other;
  if (std::get<1>(GetParam())) {
    other.emplace(*twins.mine, Options(device));
  }
  const auto data = [&](std::int64_t s) {
    return at::linspace(-1, 0.1 * static_cast<double>(s + 1), 32, at::kFloat).view({4, 8}).to(device);
  };
  const std::vector<GraphedCallable> graphed = make_graphed_callables(
      other ? *other : *twins.engine,
      {Callable(
          "first", [](torch::nn::LinearImpl& layer, const Tensors& in) { return Tensors{layer.forward(in[0])}; },
          twins.mine->part->first.ptr())},
      {{data(90)}}, GraphOptions().gradients("**", GradientPolicy::accumulated));
  twins.mine->part->graphed = [&](const at::Tensor& x) { return graphed[0]({x})[0]; };
  const auto replayed_alone = [&] { return other ? other->report().replays : 0; };
  twins.expect_plain(
      0, 2, [&](OnePart<HalfGraphed>& model, std::int64_t s) { call(model.part.get(), data(s)).sum().backward(); });
  const std::int64_t before = replayed_alone();
  twins.expect_plain(
      2, 4, [&](OnePart<HalfGraphed>& model, std::int64_t s) { call(model.part.get(), data(s)).sum().backward(); });
  EXPECT_EQ(twins.replays(), 2) << "of the call alone";
  EXPECT_EQ(replayed_alone(), before);
  twins.mine->part->graphed = nullptr;
}

INSTANTIATE_TEST_SUITE_P(Verified, CallableInACall, testing::Combine(testing::Values(0, 2), testing::Bool()));

}  // namespace
}  // namespace sidestream::testing_model
