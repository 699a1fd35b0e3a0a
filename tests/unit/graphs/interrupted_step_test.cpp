// A step that does not run to its end: left by an exception at any place, or ended before its backward. The engine goes on,
// and the backward of what the step had computed may still run, as in plain training.
#include <chrono>
#include <cstdio>
#include <thread>

#include "sidestream/call.h"
#include "unit/graphs/trapped_training.h"

namespace sidestream::testing_model {
namespace {

using Place = Trap::Place;

/// What a program throws that is no std::exception.
struct Interrupted {};

class InterruptedStepTest : public TrappedTraining {
 protected:
  const bool hooks_ = !GetParam().accumulate;  // graphs that own the gradients refuse hooks

  void train_until(Subject& subject, std::int64_t steps) const {
    for (std::int64_t s = 0; s < steps; ++s) {
      bool began = false;
      train(subject, s, began);
    }
  }
};

TEST_P(InterruptedStepTest, LeftAtAnyPlaceAtAnyStep) {
  enum class At { begin, within_a_call, between_calls, before_backward, after_backward };
  int tried = 0;
  for (std::int64_t at_step = 0; at_step < kSteps; ++at_step) {
    for (const At at : {At::begin, At::within_a_call, At::between_calls, At::before_backward, At::after_backward}) {
      Subject subject(*this, hooks_);
      train_until(subject, at_step);
      const Place place = at == At::within_a_call ? Place::in_nested_scope : Place::between_calls;
      if (at == At::within_a_call || at == At::between_calls) {
        subject.trap.arm(place, 1, [] { throw Interrupted(); });
      }
      bool caught = false;
      try {
        const auto step = subject.engine.step();
        if (at == At::begin) {
          throw Interrupted();
        }
        const at::Tensor loss = subject.model.loss(trapped_input(at_step, device_));
        if (at == At::before_backward) {
          throw Interrupted();
        }
        loss.backward();
        if (at == At::after_backward) {
          throw Interrupted();
        }
      } catch (const Interrupted&) {
        caught = true;
      }
      // Calls that are graphs by now run no user code any more.
      EXPECT_EQ(caught, at != At::within_a_call || at_step < 1 || subject.trap.sprung());
      subject.trap.disarm();
      const std::string after = "place " + std::to_string(static_cast<int>(at)) + " of step " + std::to_string(at_step);
      EXPECT_EQ(subject.broken(), "") << after;
      expect_usable(subject, after);
      tried += caught ? 1 : 0;
    }
  }
  std::printf("a step left by an exception | %s | %d | all clean\n", GetParam().name.c_str(), tried);
}

TEST_P(InterruptedStepTest, ACallThatThrewIsCaughtInItsStep) {
  for (std::int64_t at_step = 0; at_step < kSteps; ++at_step) {
    const std::string when = "step " + std::to_string(at_step);
    Subject subject(*this, hooks_);
    train_until(subject, at_step);
    clear_gradients(subject.model);
    {
      const auto step = subject.engine.step();
      subject.trap.arm(Place::in_scope, 1, [] { throw Interrupted(); });
      try {
        (void)subject.model.loss(trapped_input(at_step, device_));
      } catch (const Interrupted&) {  // a batch that is left out, and the next one
      }
      subject.trap.disarm();
      subject.model.loss(trapped_input(at_step + 1, device_)).backward();
      EXPECT_TRUE(same(gradients(subject.model), expected_[at_step + 1])) << when;
    }
    EXPECT_EQ(subject.broken(), "") << when;
    expect_usable(subject, when);
  }
}

TEST_P(InterruptedStepTest, ACallThatAlwaysThrowsIsNotCaptured) {
  Subject subject(*this, hooks_);
  for (std::int64_t s = 0; s < kSteps; ++s) {
    const auto step = subject.engine.step();
    EXPECT_THROW((void)call(
                     "layers.broken", [](const at::Tensor& /*x*/) -> at::Tensor { throw Interrupted(); },
                     trapped_input(0, device_)),
                 Interrupted);
    clear_gradients(subject.model);
    subject.model.loss(trapped_input(s, device_)).backward();
    EXPECT_TRUE(same(gradients(subject.model), expected_[s])) << s;
  }
  expect_usable(subject, "a call that always throws");
}

TEST_P(InterruptedStepTest, ABackwardAfterItsStepHasEnded) {
  for (const bool left_by_exception : {false, true}) {
    for (std::int64_t at_step = 0; at_step < kSteps; ++at_step) {
      const std::string when = (left_by_exception ? "left, step " : "ended, step ") + std::to_string(at_step);
      Subject subject(*this, hooks_);
      train_until(subject, at_step);
      clear_gradients(subject.model);
      at::Tensor loss;
      try {
        const auto step = subject.engine.step();
        loss = subject.model.loss(trapped_input(at_step, device_));
        if (left_by_exception) {
          throw Interrupted();
        }
      } catch (const Interrupted&) {
      }
      loss.backward();
      EXPECT_TRUE(same(gradients(subject.model), expected_[at_step])) << when;
      loss = at::Tensor();
      EXPECT_EQ(subject.broken(), "") << when;
      expect_usable(subject, when);
    }
  }
}

// Autograd's thread does so: it has the nodes that did not run in its queue when the exception comes out.
TEST_P(InterruptedStepTest, ABackwardThatThrewIsLetGoOfInTheNextStepsBegin) {
  Subject subject(*this, hooks_);
  train_until(subject, 2);
  const std::int64_t captures = subject.engine.report().captures;
  using Clock = std::chrono::steady_clock;
  std::thread holder;
  Clock::time_point freed;
  try {
    const auto step = subject.engine.step();
    const at::Tensor loss = subject.model.loss(trapped_input(2, device_));
    holder = std::thread([graph = loss, &freed]() mutable {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      graph.reset();
      freed = Clock::now();
    });
    loss.register_hook([](const at::Tensor& /*grad*/) { throw ModelBroke(0); });
    loss.backward();
  } catch (const ModelBroke&) {
  }
  const Clock::time_point begun = Clock::now();
  expect_usable(subject, "a backward that threw");
  holder.join();
  if (freed - begun < std::chrono::milliseconds(150)) {  // on a busy machine later than the begin waits
    EXPECT_EQ(subject.engine.report().captures, captures) << "what was let go of is no microbatch in flight";
  }
}

// Each sequence is awaited with a bound that a signal must beat: without the signal the test runs into its time limit.
TEST_P(InterruptedStepTest, TheWaitForABackwardEndsWithASignalOrAtItsBound) {
  using Clock = std::chrono::steady_clock;
  Subject subject(*this, hooks_);
  train_until(subject, 2);
  const auto step = subject.engine.step();
  at::Tensor loss = subject.model.loss(trapped_input(2, device_));
  const EngineSequences& sequences = EngineAccess::state(subject.engine).sequences();
  const auto pending = [&] {
    int count = 0;
    sequences.for_each([&](const GraphSequence& sequence) { count += sequence.pending().any() ? 1 : 0; });
    return count;
  };
  const int graphed = pending();
  EXPECT_EQ(graphed > 0, !GetParam().graph.empty());
  sequences.for_each([](const GraphSequence& sequence) { sequence.pending().await_none(Clock::now()); });
  EXPECT_EQ(pending(), graphed) << "the graph is held";
  std::thread holder([graph = std::move(loss)]() mutable {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    graph.reset();
  });
  sequences.for_each(
      [](const GraphSequence& sequence) { sequence.pending().await_none(Clock::now() + std::chrono::hours(1)); });
  EXPECT_EQ(pending(), 0);
  holder.join();
}

TEST_P(InterruptedStepTest, WhatAnInterruptedStepComputedOutlivesTheNextSteps) {
  for (std::int64_t at_step = 0; at_step < kSteps; ++at_step) {
    const std::string when = "step " + std::to_string(at_step);
    Subject subject(*this, hooks_);
    train_until(subject, at_step);
    at::Tensor loss;
    try {
      const auto step = subject.engine.step();
      loss = subject.model.loss(trapped_input(at_step, device_));
      throw Interrupted();
    } catch (const Interrupted&) {
    }
    for (std::int64_t s = 0; s < 3; ++s) {
      bool began = false;
      train(subject, s, began);
      EXPECT_TRUE(same(gradients(subject.model), expected_[s])) << when << ", then " << s;
    }
    loss = at::Tensor();
    EXPECT_EQ(subject.broken(), "") << when;
    expect_usable(subject, when);
  }
}

TEST_P(InterruptedStepTest, TheEngineIsGoneWhenBackwardRuns) {
  for (std::int64_t at_step = 0; at_step < kSteps; ++at_step) {
    Trap trap;
    TrappedModel model(kLayers, trap);
    model.to(device_);
    at::Tensor loss;
    {
      OffloadEngine engine(model, options(trap));
      for (std::int64_t s = 0; s <= at_step; ++s) {
        clear_gradients(model);
        const auto step = engine.step();
        loss = model.loss(trapped_input(s, device_));
        if (s < at_step) {
          loss.backward();
        }
      }
    }
    loss.backward();
    EXPECT_TRUE(same(gradients(model), expected_[at_step])) << "step " << at_step;
  }
}

INSTANTIATE_TEST_SUITE_P(Wrapped, InterruptedStepTest, kTrappedWrappings,
                         [](const testing::TestParamInfo<Wrapping>& info) { return info.param.name; });

}  // namespace
}  // namespace sidestream::testing_model
