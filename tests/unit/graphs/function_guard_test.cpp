// Plain functions may reach all of the model: what a replay looks at of it, and what a step's begin does.
#include <gtest/gtest.h>

#include "guard_models.h"
#include "sidestream/owning.h"

namespace sidestream {
namespace {

using testing_model::part_input;
using testing_model::PartModel;
using testing_model::Twins;

class FunctionGuardTest : public testing::Test {
 protected:
  /// The middle part, reached by a function that is given no module.
  void train(PartModel& model, std::int64_t s) const {
    const at::Tensor x = part_input(model, s, device_);
    call("middle", owning([m = &model](const at::Tensor& h) { return m->part(1).forward(h); }), x)
        .square()
        .mean()
        .backward();
  }
  [[nodiscard]] Twins<PartModel>::Act train() const {
    return [this](PartModel& model, std::int64_t s) { train(model, s); };
  }
  /// Trains, applies `change` in the middle of a step, and trains in it again.
  template <class Change>
  [[nodiscard]] Twins<PartModel>::Act train_around(const Change& change) const {
    return [this, change](PartModel& model, std::int64_t s) {
      train(model, s);
      model.zero_grad();
      torch::manual_seed(57);
      change(model);
      train(model, s + 10);
    };
  }
  void replace_parts(PartModel& model) const {
    torch::nn::ModuleList parts;
    for (std::int64_t i = 0; i < 3; ++i) {
      auto other = std::make_shared<testing_model::Part>(model.width());
      other->to(device_);
      parts->push_back(other);
    }
    model.parts = model.replace_module("parts", parts);
  }

  c10::Device device_ = find_device("sim");
  Options options_ = Options(device_).graph("**");
};

TEST_F(FunctionGuardTest, AReplacedModuleOnTheWayToItsWeightsIsSeenAtOnce) {
  Twins<PartModel> twins(options_);
  twins.expect_plain(0, 3, train());
  EXPECT_EQ(twins.replays(), 2);
  twins.expect_plain(3, train_around([this](PartModel& model) { replace_parts(model); }));
  twins.expect_plain(4, 7, train());
  EXPECT_EQ(twins.replays(), 2) << "captured again";
}

TEST_F(FunctionGuardTest, AReplacedModuleThatHasItsWeightsIsSeenAtOnce) {
  Twins<PartModel> twins(options_);
  twins.expect_plain(0, 3, train());
  twins.expect_plain(3, train_around([this](PartModel& model) {
                       auto other = torch::nn::Linear(2 * model.width(), model.width());
                       other->to(device_);
                       model.part(1).fc2 = model.part(1).replace_module("fc2", other);
                     }));
  twins.expect_plain(4, 7, train());
  EXPECT_EQ(twins.replays(), 2) << "captured again";
}

TEST_F(FunctionGuardTest, ATrainingFlagOfAnotherModuleIsSeenAtOnce) {
  Twins<PartModel> twins(options_);
  twins.expect_plain(0, 3, train());
  const std::int64_t captures = twins.captures();
  for (std::int64_t s = 3; s < 6; ++s) {
    twins.expect_plain(s, train_around([](PartModel& model) { model.part(2).train(!model.part(2).is_training()); }));
  }
  EXPECT_GT(twins.captures(), captures);
}

TEST_F(FunctionGuardTest, AModuleRegisteredElsewhereIsSeenAtTheNextStepsBegin) {
  Twins<PartModel> twins(options_);
  twins.expect_plain(0, 3, train());
  const std::int64_t captures = twins.captures();
  twins.expect_plain(
      3, train_around([](PartModel& model) { model.part(2).register_module("further", torch::nn::Dropout(0.1)); }));
  EXPECT_EQ(twins.captures(), captures);
  twins.expect_plain(4, 7, train());
  EXPECT_GT(twins.captures(), captures);
}

}  // namespace
}  // namespace sidestream
