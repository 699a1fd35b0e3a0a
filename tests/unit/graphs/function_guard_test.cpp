// Plain functions may reach all of the model: what a replay looks at of it, and what a step's begin does.
#include <cstdint>

#include <gtest/gtest.h>
#include <torch/nn/init.h>

#include "guard_models.h"
#include "sidestream/bucketed_callables.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/owning.h"

namespace sidestream::testing_model {
namespace {

/// No module that has tensors registers the dropout.
class ProjectionModel : public torch::nn::Module {
 public:
  ProjectionModel() {
    torch::manual_seed(29);
    for (const at::Tensor& parameter : parameters()) {
      torch::nn::init::normal_(parameter, 0, 0.25);
    }
  }
  at::Tensor forward(const at::Tensor& h) { return down(drop(up(h))); }
  void replace_dropout() { drop = replace_module("drop", torch::nn::Dropout(0.25)); }

  torch::nn::Linear up = register_module("up", torch::nn::Linear(8, 16));
  torch::nn::Dropout drop = register_module("drop", torch::nn::Dropout(0.5));
  torch::nn::Linear down = register_module("down", torch::nn::Linear(16, 8));
};

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
      auto other = std::make_shared<Part>(model.width());
      other->to(device_);
      parts->push_back(other);
    }
    model.parts = model.replace_module("parts", parts);
  }

  [[nodiscard]] at::Tensor rows(std::int64_t s, std::int64_t count = 6) const {
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(300 + s));
    return at::randn({count, 8}, generator, at::kFloat).to(device_);
  }
  /// Trains a projection, reached by a function that is given no module.
  [[nodiscard]] Twins<ProjectionModel>::Act project() const {
    return [this](ProjectionModel& model, std::int64_t s) {
      call("project", owning([m = &model](const at::Tensor& h) { return m->forward(h); }), rows(s))
          .square()
          .mean()
          .backward();
    };
  }
  [[nodiscard]] static Callable projection(ProjectionModel& model) {
    return Callable("project", owning([m = &model](const Tensors& inputs) { return Tensors{m->forward(inputs[0])}; }));
  }
  /// Trains with `graphed` where the model is the engine's, and behind replacements between steps and inside of one.
  template <class Graphed>
  void expect_plain_around_replacements(Twins<ProjectionModel>& twins, const Graphed& graphed) const {
    const auto step = [&](ProjectionModel& model, std::int64_t s) {
      const Tensors x{rows(s)};
      const Tensors y = &model == twins.mine.get() ? graphed(x) : Tensors{model.forward(x[0])};
      y[0].square().mean().backward();
    };
    twins.expect_plain(0, 2, step);
    twins.both(std::mem_fn(&ProjectionModel::replace_dropout));
    twins.expect_plain(2, 4, step);
    twins.expect_plain(4, [&](ProjectionModel& model, std::int64_t s) {
      step(model, s);
      model.replace_dropout();
      step(model, s + 10);
    });
    EXPECT_EQ(twins.engine->report().recaptures, 2);
    EXPECT_EQ(twins.engine->report().eager_calls, 0);
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

/// Reads the weights of a layer that another module has registered.
class Borrower : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& h) { return lender->forward(h).tanh(); }
  std::shared_ptr<torch::nn::LinearImpl> lender;
};

class LendingModel : public torch::nn::Module {
 public:
  LendingModel() {
    torch::manual_seed(29);
    layer = register_module("layer", torch::nn::Linear(8, 8));
    borrower->lender = layer.ptr();
    layer->weight.register_hook([](const at::Tensor& gradient) { return gradient * 3; });
  }
  torch::nn::Linear layer{nullptr};
  std::shared_ptr<Borrower> borrower = register_module("borrower", std::make_shared<Borrower>());
};

TEST_F(FunctionGuardTest, AHookOfTheTrainerIsNoHookOfTheCallThatReadsItsWeight) {
  for (const bool by_function : {true, false}) {
    Twins<LendingModel> twins{Options(device_).graph("**")};
    twins.expect_plain(0, 4, [&](LendingModel& model, std::int64_t s) {
      const at::Tensor y =
          by_function ? call("layer", owning([m = &model](const at::Tensor& h) { return m->layer(h).tanh(); }), rows(s))
                      : call(model.borrower, rows(s));
      y.square().mean().backward();
    });
    EXPECT_EQ(twins.replays(), 2);
  }
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

TEST_F(FunctionGuardTest, AReplacedModuleWithoutTensorsIsSeenAtTheNextStepsBegin) {
  Twins<ProjectionModel> twins(options_);
  twins.expect_plain(0, 3, project());
  EXPECT_EQ(twins.replays(), 2);
  twins.both(std::mem_fn(&ProjectionModel::replace_dropout));
  twins.expect_plain(3, 6, project());
  EXPECT_EQ(twins.replays(), 2) << "captured again";
}

TEST_F(FunctionGuardTest, AReplacedModuleWithoutTensorsIsSeenWhereRanksDoNotCapture) {
  bool all = true;
  options_.graph_options(GraphOptions().agree_to_capture([&](bool mine) { return mine && all; }));
  Twins<ProjectionModel> twins(options_);
  twins.expect_plain(0, 3, project());
  EXPECT_EQ(twins.replays(), 2);
  twins.both(std::mem_fn(&ProjectionModel::replace_dropout));
  all = false;
  twins.expect_plain(3, 5, project());
  EXPECT_EQ(twins.replays(), 0);
  all = true;
  twins.expect_plain(5, 8, project());
  EXPECT_EQ(twins.replays(), 2) << "captured again";
}

TEST_F(FunctionGuardTest, AReplacedModuleWithoutTensorsIsSeenByACallableAtOnce) {
  Twins<ProjectionModel> twins{Options(device_)};
  const auto graphed = make_graphed_callables(*twins.engine, {projection(*twins.mine)}, {{rows(0)}});
  expect_plain_around_replacements(twins, graphed[0]);
}

TEST_F(FunctionGuardTest, AReplacedModuleWithoutTensorsIsSeenByABucketAtOnce) {
  Twins<ProjectionModel> twins{Options(device_)};
  const auto graphed = make_bucketed_callables(*twins.engine, {projection(*twins.mine)}, {{{rows(0)}}, {{rows(0, 3)}}});
  expect_plain_around_replacements(twins, graphed[0]);
}

}  // namespace
}  // namespace sidestream::testing_model
