// Options of LibTorch's own modules that a schedule changes: a capture bakes in their numbers.
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "guard_models.h"
#include "sidestream/error.h"

namespace sidestream::testing_model {
namespace {

/// A model of one part.
class ModuleOptionTest : public testing::Test {
 protected:
  static Options options() { return Options(find_device("sim")).graph("parts.0"); }
  static void train(PartModel& model, std::int64_t s) {
    model.forward(part_input(model, s, model.part(0).fc1->weight.device())).square().mean().backward();
  }
  /// `change` is made to both models between steps 3 and 4, and `back` between steps 7 and 8.
  static void expect_plain(Twins<PartModel>& twins, void (*change)(Part&), void (*back)(Part&)) {
    twins.expect_plain(0, 4, train);
    twins.both([&](PartModel& model) { change(model.part(0)); });
    twins.expect_plain(4, 8, train);
    twins.both([&](PartModel& model) { back(model.part(0)); });
    twins.expect_plain(8, 12, train);
  }
  static std::shared_ptr<PartModel> one_part() { return std::make_shared<PartModel>(1); }
};

TEST_F(ModuleOptionTest, ADropoutRateIsAVariant) {
  Twins<PartModel> twins(options(), one_part);
  expect_plain(
      twins, [](Part& part) { part.drop->options.p(0.6); }, [](Part& part) { part.drop->options.p(0.5); });
  const Report report = twins.engine->report();
  EXPECT_EQ(report.captures, 4);     // a forward and a backward for each rate
  EXPECT_EQ(report.eager_calls, 2);  // the first with each
}

TEST_F(ModuleOptionTest, SoIsTheMomentumOfANorm) {
  Twins<PartModel> twins(options(), one_part);
  expect_plain(
      twins, [](Part& part) { part.norm->options.momentum(0.6); },
      [](Part& part) { part.norm->options.momentum(0.1); });
}

TEST_F(ModuleOptionTest, ARateOfEachStepRunsEagerly) {
  Twins<PartModel> twins(options(), one_part);
  for (std::int64_t s = 0; s < 6; ++s) {
    twins.both([&](PartModel& model) { model.part(0).drop->options.p(0.1 * static_cast<double>(s)); });
    twins.expect_plain(s, train);
  }
}

TEST_F(ModuleOptionTest, WhereNewArgumentsAreAnErrorItIsNamed) {
  Twins<PartModel> twins(options().call_options(CallOptions().on_new_arguments(OnNewArguments::error)), one_part);
  twins.expect_plain(0, 3, train);
  twins.mine->part(0).drop->options.p(0.6);
  EXPECT_THROWS(UsageError, "\"drop\": its option p is 0.6, was 0.5", twins.expect_plain(3, train));
}

}  // namespace
}  // namespace sidestream::testing_model
