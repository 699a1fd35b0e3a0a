// Steps, scopes, engines and models that end in another order, on another thread, or not at all: typed errors, and an engine
// that trains on.
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "models/block_model.h"
#include "sidestream/bucketed_callables.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/graphed_step.h"
#include "sidestream/scope.h"
#include "warnings.h"

namespace sidestream::testing_model {
namespace {

class LifetimeTest : public testing::Test {
 protected:
  LifetimeTest() {
    model_->to(device_);
    BlockModel plain(shape_);
    plain.to(device_);
    for (std::int64_t s = 0; s < 4; ++s) {
      clear_gradients(plain);
      plain.loss_of(s).backward();
      expected_.push_back(gradients(plain));
    }
  }

  [[nodiscard]] Options options() const {
    return Options(device_).min_bytes(1024).graph("blocks.*").offload("blocks.*.*");
  }
  void train(std::int64_t s) {
    clear_gradients(*model_);
    model_->loss_of(s).backward();
    EXPECT_TRUE(same(gradients(*model_), expected_[static_cast<std::size_t>(s)])) << "step " << s;
  }
  /// The engine captures, replays, and gives what plain training gives.
  void expect_usable(OffloadEngine& engine) {
    for (std::int64_t s = 0; s < 3; ++s) {
      auto step = engine.step();
      train(s);
      step.finish();
    }
    EXPECT_GT(engine.report().replays, 0);
  }

  c10::Device device_ = find_device("sim");
  BlockModel::Shape shape_{.layers = 2};
  std::shared_ptr<BlockModel> model_ = std::make_shared<BlockModel>(shape_);
  std::vector<StepTensors> expected_;
};

TEST_F(LifetimeTest, FinishEndsAStepOnce) {
  OffloadEngine engine(*model_, options());
  std::optional<Step> step(engine.step());
  train(0);
  step->finish();
  EXPECT_EQ(engine.report().steps, 1);
  step->finish();
  step.reset();
  EXPECT_EQ(engine.report().steps, 1);
  Step first = engine.step();
  Step second = std::move(first);
  first.finish();  // NOLINT: what was moved from has ended
  EXPECT_THROWS(UsageError, "active already", (void)engine.step());
  second.finish();
  expect_usable(engine);
}

TEST_F(LifetimeTest, FinishThrowsWhatAnOptionalKeepsForTheNextStep) {
  OffloadEngine engine(*model_, options());
  ExpectedWarnings warnings;
  {
    auto step = engine.step();
    const auto scope = std::make_unique<OffloadScope>("open");
    EXPECT_THROWS(UsageError, "scope \"open\" is still open", step.finish());
  }
  EXPECT_EQ(warnings.take().size(), 0U) << "it was thrown";
  std::optional<Step> step(engine.step());
  auto scope = std::make_unique<OffloadScope>("open");
  step.reset();
  scope.reset();
  const std::vector<std::string> texts = warnings.take();
  ASSERT_EQ(texts.size(), 1U);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "scope \"open\" is still open", texts[0]);
  EXPECT_EQ(engine.report().steps, 0) << "neither was whole";
  EXPECT_THROWS(UsageError, "scope \"open\" is still open", (void)engine.step());
  expect_usable(engine);
}

TEST_F(LifetimeTest, AStepThatAnExceptionLeavesKeepsNothing) {
  OffloadEngine engine(*model_, options());
  try {
    const auto scope_holder = std::make_unique<std::optional<OffloadScope>>();
    const auto step = engine.step();
    scope_holder->emplace("open");
    throw std::runtime_error("the data broke");
  } catch (const std::runtime_error&) {
  }
  expect_usable(engine);
}

// A thread's engine, recorder and hooks were put back as on a stack: ended first, the outer step left the inner one's dead.
TEST_F(LifetimeTest, StepsOfTwoEnginesEndInAnyOrder) {
  for (const bool outer_first : {true, false}) {
    BlockModel other(shape_);
    other.to(device_);
    auto outer = std::make_unique<OffloadEngine>(*model_, options());
    auto inner = std::make_unique<OffloadEngine>(other, options());
    for (std::int64_t s = 0; s < 4; ++s) {
      clear_gradients(other);
      std::optional<Step> outer_step(outer->step());
      train(s);
      std::optional<Step> inner_step(inner->step());
      other.loss_of(s).backward();
      EXPECT_TRUE(same(gradients(other), expected_[static_cast<std::size_t>(s)])) << "step " << s;
      if (outer_first) {
        outer_step->finish();
        clear_gradients(other);
        other.loss_of(s).backward();
        EXPECT_TRUE(same(gradients(other), expected_[static_cast<std::size_t>(s)])) << "still inside, step " << s;
        inner_step->finish();
      } else {
        inner_step->finish();
        train(s);
        outer_step->finish();
      }
    }
    EXPECT_GT(outer->report().replays, 0);
    EXPECT_GT(inner->report().replays, 0);
    outer.reset();
    inner.reset();
    train(0);  // no engine is active on this thread any more
  }
}

TEST_F(LifetimeTest, AStepEndsOnItsOwnThread) {
  OffloadEngine engine(*model_, options());
  auto step = engine.step();
  train(0);
  std::string message;
  std::thread([&] { message = message_of<UsageError>([&] { step.finish(); }); }).join();
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "another thread", message);
  train(1);
  step.finish();
  EXPECT_EQ(engine.report().steps, 1);
  expect_usable(engine);
}

TEST_F(LifetimeTest, AStepThatIsLeftOnAnotherThreadIsFoundByTheNext) {
  OffloadEngine engine(*model_, options());
  for (int i = 0; i < 2; ++i) {  // in the sizing pass, and later
    std::vector<std::string> warned;
    std::optional<Step> step(engine.step());
    train(0);
    std::thread([&] {
      ExpectedWarnings warnings;
      step.reset();
      warned = warnings.take();
    }).join();
    ASSERT_EQ(warned.size(), 1U);
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "another thread", warned[0]);
    EXPECT_THROWS(UsageError, "another thread", (void)engine.step());
    expect_usable(engine);
  }
}

std::optional<Step>* step_to_end = nullptr;

at::Tensor finishes_the_step(const at::Tensor& x) {
  EXPECT_THROWS(UsageError, "inside of one of its calls", (*step_to_end)->finish());
  return x.tanh() * x;
}

at::Tensor destroys_the_step(const at::Tensor& x) {
  const at::Tensor y = x.tanh();
  step_to_end->reset();
  return y * x;
}

TEST_F(LifetimeTest, AStepDoesNotEndInsideOfOneOfItsCalls) {
  for (const char* name : {"graphed", "scope"}) {
    SCOPED_TRACE(name);
    OffloadEngine engine(*model_, options().graph("graphed").offload("graphed,scope"));
    const at::Tensor x = at::ones({8}, device_).requires_grad_(true);
    std::optional<Step> step(engine.step());
    step_to_end = &step;
    train(0);
    call(name, finishes_the_step, x).sum().backward();
    step->finish();
    engine.reset();

    ExpectedWarnings warnings;
    step.emplace(engine.step());
    train(1);
    call(name, destroys_the_step, x).sum().backward();
    EXPECT_EQ(warnings.take().size(), 1U);
    EXPECT_THROWS(UsageError, "inside of one of its calls", (void)engine.step());
  }
}

TEST_F(LifetimeTest, AnEngineThatGoesOnAnotherThreadLeavesNoTrace) {
  auto engine = std::make_unique<OffloadEngine>(*model_, options());
  std::optional<Step> step(engine->step());
  train(0);
  std::thread([&] {
    ExpectedWarnings warnings;
    step.reset();
    engine.reset();
  }).join();
  train(1);
  OffloadEngine next(*model_, options());
  expect_usable(next);
}

TEST_F(LifetimeTest, ScopesEndInsideOfTheirStepAndInOrder) {
  OffloadEngine engine(*model_, options());
  ExpectedWarnings warnings;
  {
    auto step = engine.step();
    OffloadScope twice("twice");
    twice.end();
    twice.end();
    OffloadScope outer("outer");
    OffloadScope inner("inner");
    EXPECT_THROWS(UsageError, "\"outer\" was ended before the scope \"outer.inner\"", outer.end());
    EXPECT_THROWS(UsageError, "after the scope", inner.end());
    step.finish();
    engine.reset();  // the patterns match none of this
  }
  {
    auto step = engine.step();
    OffloadScope late("late");
    EXPECT_THROWS(UsageError, "still open", step.finish());
    EXPECT_THROWS(UsageError, "after its step", late.end());
  }
  {
    auto step = engine.step();
    auto scope = std::make_unique<OffloadScope>("home");
    std::string message;
    std::thread([&] { message = message_of<UsageError>([&] { scope->end(); }); }).join();
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "another thread", message);
    scope->end();
    step.finish();
    engine.reset();
  }
  EXPECT_TRUE(warnings.take().empty());
  {
    auto step = engine.step();
    auto outer = std::make_unique<OffloadScope>("outer");
    auto inner = std::make_unique<OffloadScope>("inner");
    outer.reset();
    EXPECT_EQ(warnings.take().size(), 1U);
    EXPECT_THROWS(UsageError, "was ended before", OffloadScope next("next")) << "the next scope throws what was kept";
    inner.reset();
    EXPECT_EQ(warnings.take().size(), 1U);
    EXPECT_THROWS(UsageError, "after the scope", step.finish()) << "so does the end of the step";
  }
  engine.reset();
  expect_usable(engine);
}

// What a graphed call leaves open, its capture would close at another place.
TEST_F(LifetimeTest, AScopeThatOutlivesItsCallIsRefused) {
  OffloadEngine engine(*model_, options().graph("leaves_open"));
  std::unique_ptr<OffloadScope> scope;
  auto step = engine.step();
  EXPECT_THROWS(UsageError, "inside of it", {
    (void)call("leaves_open", owning([&](const at::Tensor& x) {
                 scope = std::make_unique<OffloadScope>("left");
                 return x * 2;
               }),
               at::ones({4}).to(device_).requires_grad_(true));
  });
  step.finish();
}

TEST_F(LifetimeTest, EngineAndModelMayGoBeforeBackward) {
  for (std::int64_t at_step = 0; at_step < 3; ++at_step) {
    auto model = std::make_unique<BlockModel>(shape_);
    model->to(device_);
    const auto parameters = model->named_parameters();
    auto engine = std::make_unique<OffloadEngine>(*model, options());
    at::Tensor kept;
    for (std::int64_t s = 0; s <= at_step; ++s) {
      clear_gradients(*model);
      auto step = engine->step();
      kept = model->loss_of(s);
      if (s < at_step) {
        kept.backward();
      }
      step.finish();
    }
    engine.reset();
    model.reset();
    kept.backward();
    for (const auto& expected : expected_[static_cast<std::size_t>(at_step)]) {
      const at::Tensor* found = nullptr;
      for (const auto& item : parameters) {
        found = expected.name == "gradient of " + item.key() ? &item.value() : found;
      }
      ASSERT_NE(found, nullptr) << expected.name;
      EXPECT_TRUE(same({{expected.name, found->grad()}}, {expected})) << "step " << at_step;
    }
  }
}

TEST_F(LifetimeTest, AnEngineSharesInAModelThatIsShared) {
  const std::weak_ptr<BlockModel> seen = model_;
  OffloadEngine engine(*model_, options());
  expect_usable(engine);
  model_.reset();
  EXPECT_FALSE(seen.expired());
  auto step = engine.step();  // looks at the model
  step.finish();
}

TEST_F(LifetimeTest, WhatWasMovedFromSaysSo) {
  OffloadEngine engine(*model_, options());
  OffloadEngine moved(std::move(engine));
  EXPECT_THROWS(UsageError, "moved from", (void)engine.step());    // NOLINT
  EXPECT_THROWS(UsageError, "moved from", (void)engine.report());  // NOLINT
  EXPECT_THROWS(UsageError, "moved from", engine.reset());         // NOLINT
  expect_usable(moved);
  auto graphed = make_graphed_callables(moved, {Callable("f", [](const Tensors& in) { return Tensors{in[0] * 2}; })},
                                        {{at::ones({4}).to(device_).requires_grad_(true)}});
  const GraphedCallable taken = std::move(graphed[0]);
  EXPECT_THROWS(UsageError, "moved from", (void)graphed[0]({}));     // NOLINT
  EXPECT_THROWS(UsageError, "moved from", (void)graphed[0].name());  // NOLINT
  EXPECT_THROWS(UsageError, "moved from", graphed[0].reset());       // NOLINT
}

TEST_F(LifetimeTest, CapturesOfAnEngineThatWasMovedFromAreRefused) {
  OffloadEngine engine(*model_, options());
  const OffloadEngine moved(std::move(engine));
  const at::Tensor x = at::ones({4}).to(device_).requires_grad_(true);
  const Callable twice("twice", [](const Tensors& in) { return Tensors{in[0] * 2}; });
  EXPECT_THROWS(UsageError, "moved from", (void)make_graphed_callables(engine, {twice}, {{x}}));     // NOLINT
  EXPECT_THROWS(UsageError, "moved from", (void)make_bucketed_callables(engine, {twice}, {{{x}}}));  // NOLINT
  EXPECT_THROWS(UsageError, "moved from", (void)make_graphed_step(engine, twice, {{x.detach()}}));   // NOLINT
}

TEST_F(LifetimeTest, NothingOfTheEngineRunsInsideItsCapture) {
  OffloadEngine* self = nullptr;
  int refused = 0;
  const auto listen = [&](const Progress& /*progress*/) {
    EXPECT_THROWS(UsageError, "inside a capture", (void)self->step());
    EXPECT_THROWS(UsageError, "inside a capture", self->reset());
    ++refused;
  };
  OffloadEngine engine(*model_, options().progress(listen));
  self = &engine;
  expect_usable(engine);
  EXPECT_GT(refused, 0);
}

}  // namespace
}  // namespace sidestream::testing_model
