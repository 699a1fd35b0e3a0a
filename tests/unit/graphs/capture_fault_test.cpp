// A capture fails at any call or allocation: gradients, buffers, random state and memory are as if it had not been tried, and
// trying again captures what is missing and nothing twice.
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "graphs/engine/engine_access.h"
#include "models/block_model.h"
#include "models/layer_stack.h"
#include "models/wrapping.h"
#include "runtime/forwarding_runtime.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/graphed_step.h"
#include "sidestream/scope.h"
#include "sim/device/device.h"
#include "unit/graphs/fault_runtime.h"
#include "unit/sim/rerun/every_order.h"
#include "warnings.h"

namespace sidestream::testing_model {
namespace {

/// Notes of which streams the workspaces were given up.
class WorkspacesNoted final : public ForwardingRuntime {
 public:
  using ForwardingRuntime::ForwardingRuntime;
  void forget_workspaces(c10::Stream stream) noexcept override {
    forgotten.push_back(stream);
    inner().forget_workspaces(stream);
  }
  std::vector<c10::Stream> forgotten;
};

class CaptureFaultTest : public testing::Test {
 protected:
  /// What a capture that fails must leave as it was.
  struct State {
    StepTensors tensors;
    std::int64_t allocated = 0;
  };

  State state_of(const torch::nn::Module& model) const {
    State state;
    state.tensors = gradients_and_buffers(model);
    state.tensors.emplace_back("random state", at::globalContext().defaultGenerator(device_).get_state());
    synchronize(device_);
    release_cached_memory(device_);
    state.allocated = memory_use(device_).allocated;
    return state;
  }

  /// Captures a stack with `arm` at every n until the fault is not `reached`; returns how often it failed. `offload`: names.
  int capture_with_every_fault(const std::shared_ptr<Runtime>& runtime, const std::function<void(std::int64_t)>& arm,
                               const std::function<bool()>& reached, const GraphOptions& options, bool with_gradients,
                               const std::string& offload) {
    torch::nn::Sequential model = layer_stack(2, device_, {.dropout = 0.1, .batch_norm = true});
    OffloadEngine engine(EngineAccess::engine(*model, Options(device_).offload(offload).min_bytes(1024), runtime));
    if (with_gradients) {
      model->forward(rows(0, device_)).square().mean().backward();
    }
    int failures = 0;
    for (std::int64_t n = 0; !HasFailure(); ++n) {
      const State before = state_of(*model);
      arm(n);
      try {
        (void)graph_stack(engine, model, device_, options);
      } catch (const DeviceError&) {
        ++failures;
      }
      const bool ended = !reached();
      arm(-1);
      if (ended) {
        return failures;
      }
      const State after = state_of(*model);
      EXPECT_TRUE(same(after.tensors, before.tensors)) << "fault " << n;
      EXPECT_LE(after.allocated, before.allocated) << "fault " << n;
    }
    return failures;
  }

  void expect_nothing_changes(const GraphOptions& options, bool with_gradients, bool each_allocation) {
    const sim::OneThread one_thread;
    const auto faulty = std::make_shared<FaultyRuntime>(make_runtime(device_));
    const auto arm_call = [&](std::int64_t n) { faulty->fail(n); };
    EXPECT_GT(capture_with_every_fault(
                  faulty, arm_call, [&] { return !faulty->failed().empty(); }, options, with_gradients, "**"),
              20);
    if (!each_allocation) {
      return;
    }
    // Without offload: what offloads is captured again where the device is full.
    const auto arm_allocation = [](std::int64_t n) { sim::Device::get().fail_allocation(n); };
    const auto reached = [] { return sim::Device::get().allocation_failed(); };
    EXPECT_GT(capture_with_every_fault(make_runtime(device_), arm_allocation, reached, options, with_gradients, ""),
              20);
  }

  ExpectedWarnings warnings_;  ///< of scopes whose end fails
  c10::Device device_ = find_device("sim");
};

TEST_F(CaptureFaultTest, NothingChangesWhereGradientsWait) {
  expect_nothing_changes(GraphOptions().num_warmup_iters(0), /*with_gradients=*/true, /*each_allocation=*/true);
}

TEST_F(CaptureFaultTest, NothingChangesWhereTheGraphsWouldOwnTheGradients) {
  expect_nothing_changes(GraphOptions().num_warmup_iters(0).gradients("**", GradientPolicy::accumulated),
                         /*with_gradients=*/true,
                         /*each_allocation=*/false);
  expect_nothing_changes(GraphOptions().num_warmup_iters(0).gradients("**", GradientPolicy::accumulated),
                         /*with_gradients=*/false,
                         /*each_allocation=*/true);
}

// The passes before the capture run the update too. What it writes is put back even if the device has no room for a copy of it.
TEST_F(CaptureFaultTest, AWholeStepWithAnUpdateChangesNoWeight) {
  const sim::OneThread one_thread;
  const auto fails = [&](const std::shared_ptr<Runtime>& runtime, const std::function<void(std::int64_t)>& arm,
                         std::int64_t n) {
    torch::nn::Sequential model = layer_stack(2, device_);
    OffloadEngine engine(EngineAccess::engine(*model, Options(device_).offload("**").min_bytes(1024), runtime));
    const auto weights = [&] {
      StepTensors all;
      for (const auto& item : model->named_parameters()) {
        all.emplace_back(item.key(), item.value().detach().clone());
      }
      return all;
    };
    const StepTensors before = weights();
    const auto loss = [](torch::nn::SequentialImpl& layers, const Tensors& in) -> Tensors {
      const OffloadScope scope("layers");
      return {layers.forward(in[0]).square().mean()};
    };
    const auto update = [&] {
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : model->parameters()) {
        parameter.add_(parameter.grad(), -0.5);
      }
    };
    bool failed = false;
    arm(n);
    try {
      (void)make_graphed_step(engine, Callable("step", loss, model.ptr()), {{rows(0, device_)}},
                              StepOptions().update(update));
    } catch (const std::exception& error) {
      failed = true;
      const std::string text = error.what();
      EXPECT_TRUE(text.find("made to fail") != std::string::npos || text.find("out of memory") != std::string::npos)
          << "fault " << n << ": " << text;
    }
    arm(-1);
    EXPECT_TRUE(same(weights(), before)) << "fault " << n;
    return failed;
  };
  const auto faulty = std::make_shared<FaultyRuntime>(make_runtime(device_));
  int calls = 0;
  for (std::int64_t n = 0; n < 150; ++n) {
    const bool failed = fails(
        faulty, [&](std::int64_t at) { faulty->fail(at); }, n);
    calls += failed ? 1 : 0;
    // A full device is no failure here: what offloads is captured again.
    (void)fails(
        make_runtime(device_), [](std::int64_t at) { sim::Device::get().fail_allocation(at); }, n);
  }
  EXPECT_GT(calls, 20);
}

// The memory itself is seen on a GPU alone, by ConformanceMissing.CaptureFailureCleanup.
TEST_F(CaptureFaultTest, TheWorkspacesOfPassesThatThrowAreGivenUp) {
  torch::nn::Sequential model = layer_stack(1, device_);
  for (const int fails_in : {0, 1, 2}) {  // sizing, warm-up, capture
    const auto runtime = std::make_shared<WorkspacesNoted>(make_runtime(device_));
    OffloadEngine engine(EngineAccess::engine(*model, Options(device_), runtime));
    std::vector<c10::Stream> ran_on;
    int run = 0;
    Callable callable("breaks", owning([&](const Tensors& in) {
                        ran_on.push_back(runtime->current_stream());
                        const at::Tensor y = model->forward(in[0]);
                        if (run++ == fails_in) {
                          throw std::runtime_error("the model broke");
                        }
                        return Tensors{y};
                      }));
    const at::Tensor sample = rows(0, device_).requires_grad_(true);
    EXPECT_THROWS(std::runtime_error, "the model broke",
                  (void)make_graphed_callables(engine, {callable}, {{sample}}, GraphOptions().num_warmup_iters(1)));
    ASSERT_EQ(ran_on.size(), static_cast<std::size_t>(fails_in) + 1);
    EXPECT_EQ(runtime->forgotten, std::vector<c10::Stream>{ran_on.back()}) << "pass " << fails_in;
    EXPECT_NE(ran_on.back(), runtime->current_stream());
  }
}

/// ss::call, two microbatches in flight.
class RepeatedCaptureTest : public testing::Test {
 protected:
  struct Subject {
    explicit Subject(const RepeatedCaptureTest& test)
        : faulty(std::make_shared<FaultyRuntime>(make_runtime(test.device_))), model(test.shape_) {
      model.to(test.device_);
      const Wrapping wrapping{"", "blocks.*", "blocks.*.*", 1};
      Options options = wrapping.options(test.device_, 1024);
      options.graph_options(GraphOptions(options.graph_options()).num_warmup_iters(0));
      engine = std::make_unique<OffloadEngine>(EngineAccess::engine(model, options, faulty));
    }
    std::shared_ptr<FaultyRuntime> faulty;
    BlockModel model;
    std::unique_ptr<OffloadEngine> engine;
  };

  void train(BlockModel& model, OffloadEngine* engine, std::int64_t s, std::int64_t microbatches) const {
    clear_gradients(model);
    const auto run = [&] {
      std::vector<at::Tensor> losses;
      for (std::int64_t m = 0; m < microbatches; ++m) {
        losses.push_back(model.loss_of(10 * s + m));
      }
      for (; !losses.empty(); losses.pop_back()) {
        losses.back().backward();
      }
    };
    in_step(engine, run);
  }

  StepTensors plain(std::int64_t s, std::int64_t microbatches) const {
    BlockModel model(shape_);
    model.to(device_);
    train(model, nullptr, s, microbatches);
    return gradients(model);
  }

  ExpectedWarnings warnings_;  ///< of scopes whose end fails
  c10::Device device_ = find_device("sim");
  BlockModel::Shape shape_{.layers = 2, .hidden = 16, .sequence = 8, .batch = 4};
};

TEST_F(RepeatedCaptureTest, NothingIsCapturedTwiceWhereALaterMicrobatchsCaptureFailed) {
  const auto right = plain(1, 2);
  std::int64_t captures = 0;
  std::int64_t handles = 0;
  for (std::int64_t n = -1; !HasFailure(); ++n) {  // -1: nothing fails
    Subject subject(*this);
    train(subject.model, subject.engine.get(), 0, 2);
    const std::int64_t before = subject.faulty->live_handles();
    subject.faulty->fail(n);
    try {
      const auto step = subject.engine->step();
    } catch (const DeviceError&) {
    }
    const std::string failed = subject.faulty->failed();
    subject.faulty->fail(-1);
    train(subject.model, subject.engine.get(), 1, 2);
    EXPECT_TRUE(same(gradients(subject.model), right)) << "fault " << n;
    if (n < 0) {
      captures = subject.engine->report().captures;
      handles = subject.faulty->live_handles() - before;
      EXPECT_EQ(captures, 8);
      continue;
    }
    EXPECT_EQ(subject.engine->report().captures, captures) << "fault " << n;
    if (failed != "allocate_pinned") {  // that is then asked for in pieces, group by group
      EXPECT_EQ(subject.faulty->live_handles() - before, handles) << "fault " << n << ", " << failed;
    }
    if (failed.empty()) {
      EXPECT_GT(n, 50);
      break;
    }
  }
}

TEST_F(RepeatedCaptureTest, WhatGraphsOwnStaysMarkedWhereALaterCaptureFailed) {
  Subject subject(*this);
  train(subject.model, subject.engine.get(), 0, 1);
  train(subject.model, subject.engine.get(), 1, 1);
  EngineState& engine = EngineAccess::state(*subject.engine);
  const at::Tensor output = engine.sequences().all()[0].lock()->captured().calls[0].outputs[0].tensor;
  ASSERT_NE(engine.resources().exclusions.classify(output), Exclusion::none);
  train(subject.model, subject.engine.get(), 1, 2);  // the second microbatch asks for captures of its own
  subject.faulty->fail(30);
  EXPECT_THROW((void)subject.engine->step(), DeviceError);
  EXPECT_NE(engine.resources().exclusions.classify(output), Exclusion::none);
}

TEST_F(RepeatedCaptureTest, WeightsThatMoveBackAfterAFailedCapture) {
  Subject subject(*this);
  const auto right = plain(1, 1);
  train(subject.model, subject.engine.get(), 0, 1);
  train(subject.model, subject.engine.get(), 1, 1);
  at::Tensor weight = subject.model.blocks->parameters()[0];
  const at::Tensor lies = weight.variable_data();
  weight.set_data(weight.detach().clone());
  subject.faulty->fail(10);
  EXPECT_THROW((void)subject.engine->step(), DeviceError);
  weight.set_data(lies);
  for (int i = 0; i < 2; ++i) {
    train(subject.model, subject.engine.get(), 1, 1);
    EXPECT_TRUE(same(gradients(subject.model), right));
  }
  EXPECT_EQ(subject.engine->report().replays, 2 * shape_.layers);
}

}  // namespace
}  // namespace sidestream::testing_model
