// Eager offload of models that run on several streams: each group is ordered with the streams that saved it.
#include <optional>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "graphs/engine_state.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/scope.h"
#include "stream_order.h"
#include "unit/runtime/every_order.h"

namespace sidestream {
namespace {

using testing_model::order;

constexpr std::uint64_t kSeeds = 200;

class EagerStreams : public testing::Test {
 protected:
  [[nodiscard]] at::Tensor data(std::uint64_t salt) const {
    auto generator = at::detail::createCPUGenerator(700 + salt);
    return at::randn({64, 64}, generator).to(device_).requires_grad_(true);
  }
  [[nodiscard]] c10::Stream main() { return engine_.state()->runtime().current_stream(); }
  [[nodiscard]] c10::Stream a() const { return a_.get(); }
  [[nodiscard]] c10::Stream b() const { return b_.get(); }
  void TearDown() override { synchronize(device_); }

  /// Gradients of `inputs`, on the current stream and waiting for no other.
  static std::vector<at::Tensor> gradients(const at::Tensor& loss, const std::vector<at::Tensor>& inputs) {
    return torch::autograd::grad({loss}, inputs);
  }

  /// `step(index, engine)` runs one step and returns its gradients. Step 0 is the sizing pass; steps 2 and 3 are recorded
  /// together and run again in every order: without the engine, so that the model itself is known to lack no wait, and with it.
  template <class StepBody>
  void expect_plain_in_every_order(const StepBody& step) {
    std::vector<std::byte> expected;
    for (OffloadEngine* engine : {static_cast<OffloadEngine*>(nullptr), &engine_}) {
      SCOPED_TRACE(engine == nullptr ? "plain" : "offloaded");
      for (std::uint64_t s : {0, 1}) {
        (void)step(s, engine);
      }
      synchronize(device_);
      std::vector<at::Tensor> grads;
      sim::Recording recording;
      for (std::uint64_t s : {2, 3}) {
        for (at::Tensor& grad : step(s, engine)) {
          grads.push_back(std::move(grad));
        }
      }
      recording.stop();
      if (engine == nullptr) {
        expected = sim::raw_bytes(grads);
      }
      ASSERT_EQ(sim::raw_bytes(grads), expected);
      sim::expect_same_in_every_order(recording, grads, expected, kSeeds);
    }
    EXPECT_GT(engine_.report().offloaded_bytes + engine_.report().reloaded_bytes, 0);
  }

  sim::OneThread one_thread_;
  c10::Device device_ = find_device("sim");
  torch::nn::Module model_;
  OffloadEngine engine_{model_, Options(device_).min_bytes(1024).groups_in_flight(1).offload("**")};
  OwnedStream a_ = engine_.state()->runtime().create_stream();
  OwnedStream b_ = engine_.state()->runtime().create_stream();
};

/// Each scope saves two storages of its own: what exp and tanh give.
at::Tensor scopes(at::Tensor h) {
  for (const char* name : {"first", "second", "third", "fourth"}) {
    const OffloadScope scope(name);
    h = h.exp().mul(0.5).tanh();
  }
  return h.sum();
}

std::optional<Step> maybe_step(OffloadEngine* engine) {
  return engine == nullptr ? std::nullopt : std::optional<Step>(engine->step());
}

// A microbatch leaves into host slots that the other stream's microbatch of the step before came back from.
TEST_F(EagerStreams, MicrobatchesOnStreamsThatNeverMeet) {
  std::vector<at::Tensor> inputs;
  for (std::uint64_t i = 0; i < 8; ++i) {
    inputs.push_back(data(i));
  }
  synchronize(device_);
  expect_plain_in_every_order([&](std::uint64_t s, OffloadEngine* engine) {
    const auto step = maybe_step(engine);
    std::vector<at::Tensor> grads;
    for (std::uint64_t microbatch : {0, 1}) {
      const c10::StreamGuard on_stream((s + microbatch) % 2 == 0 ? a() : b());
      const at::Tensor& x = inputs[2 * s + microbatch];
      grads.push_back(gradients(scopes(x), {x})[0]);
    }
    return grads;
  });
}

// Sources of one microbatch are let go while the other's forward runs.
TEST_F(EagerStreams, MicrobatchesInFlightOnTwoStreams) {
  std::vector<at::Tensor> inputs;
  for (std::uint64_t i = 0; i < 8; ++i) {
    inputs.push_back(data(10 + i));
  }
  synchronize(device_);
  expect_plain_in_every_order([&](std::uint64_t s, OffloadEngine* engine) {
    const auto step = maybe_step(engine);
    std::vector<at::Tensor> losses;
    for (std::uint64_t microbatch : {0, 1}) {
      const c10::StreamGuard on_stream(microbatch == 0 ? a() : b());
      losses.push_back(scopes(inputs[2 * s + microbatch]));
    }
    std::vector<at::Tensor> grads;
    for (std::uint64_t microbatch : {0, 1}) {
      const c10::StreamGuard on_stream(microbatch == 0 ? a() : b());
      grads.push_back(gradients(losses[microbatch], {inputs[2 * s + microbatch]})[0]);
      losses[microbatch].reset();
      grads.push_back(grads.back().exp().mul(0.5).tanh());  // takes the memory that backward has freed
    }
    return grads;
  });
}

// A branch of a scope runs on a stream of its own and is joined after the scope, as shared experts do.
TEST_F(EagerStreams, AScopeForksAStream) {
  std::vector<at::Tensor> inputs;
  for (std::uint64_t i = 0; i < 4; ++i) {
    inputs.push_back(data(20 + i));
  }
  synchronize(device_);
  expect_plain_in_every_order([&](std::uint64_t s, OffloadEngine* engine) {
    const auto step = maybe_step(engine);
    const c10::StreamGuard on_a(a());
    at::Tensor h = inputs[s].mul(1.5);
    for (const char* name : {"first", "second", "third"}) {
      const at::Tensor given = h;  // alive until the streams meet again: the branch reads it
      at::Tensor branch;
      {
        const OffloadScope scope(name);
        order(a(), b());
        {
          const c10::StreamGuard on_b(b());
          branch = h.exp().mul(0.1).tanh();
        }
        h = h.sigmoid();
      }
      {
        const OffloadScope scope("between");
        h = h.mul(0.9).tanh();
      }
      order(b(), a());
      h = h + branch;
    }
    return gradients(h.sum(), {inputs[s]});
  });
}

// One storage saved by operators on two streams: it leaves once, and its memory waits for both.
TEST_F(EagerStreams, AStorageSavedOnTwoStreams) {
  std::vector<at::Tensor> inputs;
  for (std::uint64_t i = 0; i < 4; ++i) {
    inputs.push_back(data(30 + i));
  }
  synchronize(device_);
  expect_plain_in_every_order([&](std::uint64_t s, OffloadEngine* engine) {
    const auto step = maybe_step(engine);
    const c10::StreamGuard on_a(a());
    at::Tensor h = inputs[s].mul(1.5);
    for (int layer = 0; layer < 3; ++layer) {
      at::Tensor shared;
      at::Tensor branch;
      {
        const OffloadScope scope("maker");
        shared = h.exp();
      }
      order(a(), b());
      {
        const c10::StreamGuard on_b(b());
        const OffloadScope scope("reader");
        branch = shared.mul(shared).tanh();
      }
      {
        const OffloadScope scope("beside");
        h = h.mul(0.3).tanh().mul(0.2).tanh();
      }
      shared.reset();
      h = h.mul(0.5).tanh();  // on memory that the scopes above may have let go
      order(b(), a());
      h = (h + branch).sigmoid();
    }
    return gradients(h.sum(), {inputs[s]});
  });
}

// A reloaded storage is read by the backward of two streams, and its memory is used again while one of them may be at it.
TEST_F(EagerStreams, AStorageReadBackOnTwoStreams) {
  std::vector<at::Tensor> inputs;
  for (std::uint64_t i = 0; i < 8; ++i) {
    inputs.push_back(data(40 + i));
  }
  synchronize(device_);
  expect_plain_in_every_order([&](std::uint64_t s, OffloadEngine* engine) {
    const auto step = maybe_step(engine);
    const c10::StreamGuard on_a(a());
    const at::Tensor& x = inputs[2 * s];
    const at::Tensor& weight = inputs[2 * s + 1];
    at::Tensor p = x.mul(1.5).tanh().mul(0.5).tanh().mul(0.5);
    at::Tensor shared = p.detach().exp();
    {
      const OffloadScope scope("a");
      p = p.mul(shared);
    }
    order(a(), b());
    at::Tensor branch;
    {
      const c10::StreamGuard on_b(b());
      const OffloadScope scope("b");
      branch = weight.mul(shared);
    }
    shared.record_stream(
        b());  // as a model must, for the tensor itself; the copy that comes back is the engine's to care for
    shared.reset();
    {
      const OffloadScope scope("more");
      p = p.sigmoid().tanh();
    }
    {
      const OffloadScope scope("last");
      p = p.sigmoid();
    }
    order(b(), a());
    return gradients(p.sum() + branch.sum(), {x, weight});
  });
}

/// When memory that an unused reload may still write is used again.
enum class Again { in_the_step, after_the_step, after_a_later_step };

class EagerReload : public EagerStreams, public testing::WithParamInterface<Again> {};

// Backward stops half-way: a group that was on its way back is dropped, and its memory used again on the model's stream, which
// is not the one that the step ends on.
TEST_P(EagerReload, UnusedOnesHarmNoLaterWork) {
  std::vector<at::Tensor> inputs;
  for (std::uint64_t i = 0; i < 4; ++i) {
    inputs.push_back(data(50 + i));
  }
  const auto use = [](const at::Tensor& from) {
    at::Tensor sum = from;
    std::vector<at::Tensor> taken;
    for (int i = 0; i < 8; ++i) {  // takes whatever was freed
      taken.push_back(taken.empty() ? from.mul(0.5) : taken.back().mul(1.5));
    }
    for (const at::Tensor& each : taken) {
      sum = sum + each;
    }
    return sum;
  };
  synchronize(device_);
  expect_plain_in_every_order([&](std::uint64_t s, OffloadEngine* engine) {
    auto step = maybe_step(engine);
    at::Tensor h = inputs[s];
    at::Tensor middle;
    std::vector<at::Tensor> grads;
    {
      const c10::StreamGuard on_a(a());
      for (const char* name : {"first", "second", "third", "fourth"}) {
        const OffloadScope scope(name);
        h = h.exp().mul(0.5).tanh();
        middle = std::string(name) == "second" ? h : middle;
      }
    }
    if (GetParam() == Again::after_a_later_step) {
      step.reset();
      if (engine != nullptr) {
        step.emplace(engine->step());
      }
    }
    {
      const c10::StreamGuard on_a(a());
      grads = gradients(h.sum(), {middle});
      middle.reset();
      h.reset();
      if (GetParam() == Again::in_the_step) {
        grads.push_back(use(grads[0]));
      }
    }
    step.reset();
    const c10::StreamGuard on_a(a());
    grads.push_back(use(grads[0]));
    return grads;
  });
}

std::string name_of(const testing::TestParamInfo<Again>& info) {
  switch (info.param) {
    case Again::in_the_step:
      return "InTheStep";
    case Again::after_the_step:
      return "AfterTheStep";
    case Again::after_a_later_step:
      return "AfterALaterStep";
  }
  return "";
}

INSTANTIATE_TEST_SUITE_P(When, EagerReload,
                         testing::Values(Again::in_the_step, Again::after_the_step, Again::after_a_later_step),
                         name_of);

// What reloads are still under way: none that was used, one that was begun for a backward which stopped before it.
TEST_F(EagerStreams, TheEndOfAStepIsBehindAllItsCopies) {
  std::vector<at::Tensor> inputs{data(60), data(61)};
  synchronize(device_);
  const auto body = [&](std::vector<at::Tensor>& alive) {
    for (const std::size_t microbatch : {0, 1}) {
      const c10::StreamGuard on_stream(microbatch == 0 ? a() : b());
      at::Tensor h = inputs[microbatch];
      at::Tensor middle;
      for (const char* name : {"first", "second", "third", "fourth"}) {
        const OffloadScope scope(name);
        h = h.exp().mul(0.5).tanh();
        middle = std::string(name) == "second" ? h : middle;
      }
      alive.push_back(torch::autograd::grad({h.sum()}, {middle}, {}, /*retain_graph=*/true)[0]);
      alive.push_back(h);
    }
  };
  for (const bool recorded : {false, true}) {
    std::vector<at::Tensor> alive;
    std::optional<sim::Recording> recording;
    if (recorded) {
      recording.emplace();
    }
    {
      const auto step = engine_.step();
      body(alive);
    }
    const at::Tensor after = at::ones({4}, inputs[0].options().requires_grad(false));
    if (recorded) {
      recording->stop();
      EXPECT_TRUE(sim::last_work_is_behind_all_copies(*recording, main()));
      EXPECT_GT(engine_.report().reloaded_bytes, 0);
    }
  }
}

}  // namespace
}  // namespace sidestream
