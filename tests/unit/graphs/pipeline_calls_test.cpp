// Stages of a pipeline as calls of one process, in orders that no nesting of forwards and backwards has.
#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <c10/util/irange.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "unit/graphs/called_stack.h"

namespace sidestream::testing_model {
namespace {

/// One forward or backward of one stage, as "F0.1": stage 0, microbatch 1.
struct Work {
  bool backward = false;
  std::size_t stage = 0;
  std::size_t microbatch = 0;
};

std::vector<Work> parse(const std::string& order) {
  std::vector<Work> all;
  for (std::size_t i = 0; i + 3 < order.size(); i += 5) {
    all.push_back(
        {order[i] == 'B', static_cast<std::size_t>(order[i + 1] - '0'), static_cast<std::size_t>(order[i + 3] - '0')});
  }
  return all;
}

/// Each layer of the stack is a stage, or the first two are one. Activations go from stage to stage detached, as between ranks.
class Pipeline {
 public:
  Pipeline(CalledStack& model, c10::Device device, std::vector<std::vector<std::size_t>> stages)
      : model_(model), device_(device), stages_(std::move(stages)) {}

  /// `s`: the step, for its data.
  void run(const std::vector<Work>& order, std::int64_t s) {
    const std::size_t microbatches = 4;
    inputs_.assign(stages_.size(), std::vector<at::Tensor>(microbatches));
    outputs_ = inputs_;
    for (const Work& work : order) {
      if (work.backward) {
        backward(work, s);
      } else {
        forward(work, s);
      }
    }
  }
  void forward(const Work& work, std::int64_t s) {
    const at::Tensor given = work.stage == 0 ? rows(10 * s + static_cast<std::int64_t>(work.microbatch), device_)
                                             : outputs_[work.stage - 1][work.microbatch];
    at::Tensor h = inputs_[work.stage][work.microbatch] = given.detach().requires_grad_(true);
    for (const std::size_t layer : stages_[work.stage]) {
      h = model_.run_layer(layer, h);
    }
    outputs_[work.stage][work.microbatch] = h;
  }
  void backward(const Work& work, std::int64_t s) {
    at::Tensor& output = outputs_[work.stage][work.microbatch];
    if (work.stage + 1 == stages_.size()) {
      (output * rows(10 * s + static_cast<std::int64_t>(work.microbatch), device_, 1)).mean().backward();
    } else {
      output.backward(inputs_[work.stage + 1][work.microbatch].grad());
    }
    output = at::Tensor();
  }

 private:
  CalledStack& model_;
  c10::Device device_;
  std::vector<std::vector<std::size_t>> stages_;
  std::vector<std::vector<at::Tensor>> inputs_;   // by stage and microbatch
  std::vector<std::vector<at::Tensor>> outputs_;  // likewise
};

struct Loop {
  const char* name;
  std::vector<std::vector<std::size_t>> stages;
  const char* order;
};

std::ostream& operator<<(std::ostream& out, const Loop& loop) { return out << loop.name; }

class PipelineCallsTest : public testing::TestWithParam<Loop> {
 protected:
  [[nodiscard]] Options options() const {
    return Options(device_).min_bytes(256).graph("layers.*").offload("layers.*");
  }
  /// So many steps give the same as plain ones, and after the first no call runs eagerly.
  void expect_replays(OffloadEngine& engine, std::int64_t steps,
                      const std::function<void(CalledStack&, std::int64_t s)>& run) {
    std::int64_t eager = 0;
    for (std::int64_t s = 0; s < steps; ++s) {
      expect_same_step(model_, &engine, plain_, s, [&](CalledStack& model) { run(model, s); });
      const std::int64_t now = engine.report().eager_calls;
      EXPECT_TRUE(s == 0 || now == eager) << "step " << s << " ran calls eagerly";
      eager = now;
    }
  }

  c10::Device device_ = find_device("sim");
  CalledStack model_{device_};
  CalledStack plain_{device_};
};

TEST_P(PipelineCallsTest, AnOrderThatOneStepRecordedRepeats) {
  OffloadEngine engine(model_, options());
  const std::vector<Work> order = parse(GetParam().order);
  Pipeline mine(model_, device_, GetParam().stages);
  Pipeline plain(plain_, device_, GetParam().stages);
  expect_replays(engine, 5,
                 [&](CalledStack& model, std::int64_t s) { (&model == &model_ ? mine : plain).run(order, s); });
  EXPECT_GT(engine.report().replays, 0);
}

INSTANTIATE_TEST_SUITE_P(
    Loops, PipelineCallsTest,
    testing::Values(
        Loop{"one_forward_one_backward", {{0}, {1, 2}}, "F0.0 F0.1 F1.0 B1.0 F1.1 B0.0 B1.1 F0.2 B0.1 F1.2 B1.2 B0.2"},
        Loop{"three_stages", {{0}, {1}, {2}}, "F0.0 F0.1 F1.0 F2.0 B2.0 F1.1 B1.0 F2.1 B0.0 B2.1 B1.1 B0.1"},
        Loop{"forwards_first", {{0, 1}, {2}}, "F0.0 F1.0 F0.1 F1.1 F0.2 F1.2 B1.0 B0.0 B1.1 B0.1 B1.2 B0.2"},
        Loop{"first_stage_last", {{0}, {1, 2}}, "F0.0 F1.0 B1.0 F0.1 F1.1 B1.1 F0.2 F1.2 B1.2 B0.0 B0.1 B0.2"},
        Loop{"nested", {{0}, {1}, {2}}, "F0.0 F1.0 F2.0 B2.0 B1.0 B0.0 F0.1 F1.1 F2.1 B2.1 B1.1 B0.1"}),
    [](const auto& info) { return std::string(info.param.name); });

/// Calls that share memory take turns: the loops run with it too, eagerly where a turn would have to wait.
TEST_P(PipelineCallsTest, SharedMemoryGivesTheSame) {
  OffloadEngine engine(model_, options().call_options(CallOptions().share_memory(true).on_pending(OnPending::eager)));
  const std::vector<Work> order = parse(GetParam().order);
  Pipeline mine(model_, device_, GetParam().stages);
  Pipeline plain(plain_, device_, GetParam().stages);
  for (std::int64_t s = 0; s < 5; ++s) {
    expect_same_step(model_, &engine, plain_, s,
                     [&](CalledStack& model) { (&model == &model_ ? mine : plain).run(order, s); });
  }
  EXPECT_GT(engine.report().replays, 0);
}

class ChangedOrderTest : public PipelineCallsTest {};

TEST_F(ChangedOrderTest, CallsThatAutogradConnectsReplayWhatOneStepRecordedOfThem) {
  // The second microbatch gives the second layer other data, and its backward runs after that of the first layer.
  OffloadEngine engine(model_, options());
  const auto run = [&](CalledStack& model, std::int64_t s) {
    model.run_layer(1, model.run_layer(0, rows(s, device_))).square().mean().backward();
    const at::Tensor first = model.run_layer(0, rows(s, device_, 1));
    const at::Tensor second = model.run_layer(1, rows(s, device_, 2).requires_grad_(true));
    first.square().mean().backward();
    second.square().mean().backward();
  };
  expect_replays(engine, 4, run);
}

std::pair<at::Tensor, at::Tensor> two_outputs(const at::Tensor& x) { return {x.sin(), x.tanh()}; }

TEST_F(ChangedOrderTest, ACallWhoseFirstOutputIsDroppedStaysInFlight) {
  OffloadEngine engine(model_, Options(device_).min_bytes(256).graph("two"));
  const auto run = [&](CalledStack& model, std::int64_t s) {
    std::vector<at::Tensor> losses;
    for (const std::int64_t microbatch : {0, 1}) {
      const at::Tensor x = model.layers->at<Mlp>(0).forward(rows(s, device_, microbatch));
      losses.push_back(call("two", &two_outputs, x).second.square().mean());
    }
    for (const at::Tensor& loss : losses) {
      loss.backward();
    }
  };
  expect_replays(engine, 4, run);
  EXPECT_EQ(engine.report().captures, 4) << "a forward and a backward for each microbatch in flight";
}

TEST_F(ChangedOrderTest, AnOrderThatNoStepRecordedThrowsBeforeMemoryInUseIsOverwritten) {
  OffloadEngine engine(model_, options());
  const auto nested = [&](CalledStack& model, std::int64_t s) {
    model.forward(rows(s, device_)).square().mean().backward();
  };
  for (std::int64_t s = 0; s < 3; ++s) {
    expect_same_step(model_, &engine, plain_, s, [&](CalledStack& model) { nested(model, s); });
  }
  // Of two connected calls the first one's backward is to run before the second one's. It is refused, and both run in their order.
  const auto crossed = [&](CalledStack& model) {
    const at::Tensor first = model.run_layer(0, rows(7, device_));
    const at::Tensor second = model.run_layer(1, first);
    if (&model == &model_) {
      EXPECT_THROWS(UsageError, "its backward runs before that of \"layers.1\"", first.square().mean().backward());
    }
    second.square().mean().backward();
  };
  expect_same_step(model_, &engine, plain_, 7, crossed);
  // The engine stays usable.
  expect_same_step(model_, &engine, plain_, 8, [&](CalledStack& model) { nested(model, 8); });
}

/// The last layer's output is alive during the backward of the first ones, and has none: a second head, or a value for the log.
TEST_F(ChangedOrderTest, ACallThatHadNoBackwardWhenItWasRecordedDelaysNoOther) {
  OffloadEngine engine(model_, options());
  at::Tensor last;
  const auto without_last = [&](CalledStack& model, std::int64_t s) {
    const at::Tensor x = rows(s, device_).requires_grad_();
    const at::Tensor h = model.run_layer(1, model.run_layer(0, x));
    at::Tensor unused = model.run_layer(2, h);
    h.square().mean().backward();
    StepTensors given = values({x.grad(), unused});
    if (&model == &model_) {
      last = std::move(unused);
    }
    return given;
  };
  for (std::int64_t s = 0; s < 4; ++s) {
    expect_same_step(model_, &engine, plain_, s, [&](CalledStack& model) { return without_last(model, s); });
    EXPECT_TRUE(s == 0 || engine.report().eager_calls == 3) << "step " << s;
  }
  EXPECT_THROWS(UsageError, "the step that was recorded had no backward of it", last.sum().backward());
  last.reset();
  const auto with_last = [&](CalledStack& model) { model.forward(rows(9, device_)).square().mean().backward(); };
  expect_same_step(model_, &engine, plain_, 9, with_last);
}

/// Two towers with a loss each: that of the second one is used from a later step on, before or after that of the first one.
TEST_F(ChangedOrderTest, ACallThatNothingConnectsMayRunItsFirstBackwardAtAnyTime) {
  for (const bool second_first : {false, true}) {
    OffloadEngine engine(model_, options());
    const auto towers = [&](CalledStack& model, std::int64_t s) {
      at::Tensor first = model.run_layer(0, rows(s, device_)).square().mean();
      at::Tensor second = model.run_layer(1, rows(s, device_, 1)).square().mean();
      if (second_first) {
        std::swap(first, second);
      }
      if (s != 0) {  // the first batch is skipped
        first.backward();
      }
      if (s >= 3) {
        second.backward();
      }
    };
    expect_replays(engine, 6, towers);
  }
}

TEST_F(ChangedOrderTest, AForwardThatWouldOverwriteRunsEagerlyOrIsRecorded) {
  OffloadEngine engine(model_, options());
  Pipeline mine(model_, device_, {{0, 1}, {2}});
  Pipeline plain(plain_, device_, {{0, 1}, {2}});
  const std::vector<Work> one_by_one = parse("F0.0 F1.0 B1.0 B0.0 F0.1 F1.1 B1.1 B0.1");
  const std::vector<Work> in_flight = parse("F0.0 F0.1 F1.0 F1.1 B1.0 B0.0 B1.1 B0.1");
  for (std::int64_t s = 0; s < 8; ++s) {
    const std::vector<Work>& order = s < 3 ? one_by_one : in_flight;
    expect_same_step(model_, &engine, plain_, s,
                     [&](CalledStack& model) { (&model == &model_ ? mine : plain).run(order, s); });
  }
}

/// An order of stages, drawn. A microbatch runs forward through all stages, and then backward through them.
std::vector<Work> drawn_order(std::mt19937& random, std::size_t stages, std::size_t microbatches) {
  std::vector<std::size_t> done(microbatches);
  std::vector<Work> order;
  while (order.size() < 2 * stages * microbatches) {
    const std::size_t microbatch = random() % microbatches;
    if (std::size_t& at = done[microbatch]; at < 2 * stages) {
      const bool backward = at >= stages;
      order.push_back({backward, backward ? 2 * stages - 1 - at : at, microbatch});
      ++at;
    }
  }
  return order;
}

class DrawnOrderTest : public PipelineCallsTest {};

TEST_F(DrawnOrderTest, OfStagesRepeats) {
  for (const std::uint32_t seed : c10::irange(24U)) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto stages = seed % 2 == 0 ? std::vector<std::vector<std::size_t>>{{0}, {1, 2}}
                                      : std::vector<std::vector<std::size_t>>{{0}, {1}, {2}};
    const std::vector<Work> order = drawn_order(random, stages.size(), 2 + seed % 3);
    OffloadEngine engine(model_, options());
    Pipeline mine(model_, device_, stages);
    Pipeline plain(plain_, device_, stages);
    expect_replays(engine, 4,
                   [&](CalledStack& model, std::int64_t s) { (&model == &model_ ? mine : plain).run(order, s); });
  }
}

/// A step of calls, drawn: each begins with data or goes on from the output of another, and backwards begin at the others' outputs.
class DrawnCalls {
 public:
  explicit DrawnCalls(std::mt19937& random) {
    std::vector<std::size_t> open;  // their outputs were not used yet
    const auto take = [&] {
      const std::size_t at = random() % open.size();
      const std::size_t call = open[at];
      open.erase(open.begin() + static_cast<std::ptrdiff_t>(at));
      return call;
    };
    const std::size_t calls = 3 + random() % 6;
    while (calls_ < calls || !open.empty()) {
      if (calls_ < calls && (open.empty() || random() % 2 == 0)) {
        const std::size_t from = !open.empty() && random() % 3 == 0 ? take() : kData;
        all_.push_back({false, calls_, from, random() % 3});
        open.push_back(calls_++);
      } else {
        all_.push_back({true, take()});
      }
    }
  }
  void run(CalledStack& model, std::int64_t s, c10::Device device) const {
    std::vector<at::Tensor> outputs(calls_);
    for (const Act& act : all_) {
      const auto number = 10 * s + static_cast<std::int64_t>(act.call);
      if (act.backward) {
        (std::exchange(outputs[act.call], {}) * rows(number, device, 1)).mean().backward();
      } else {
        outputs[act.call] =
            model.run_layer(act.layer, act.from == kData ? rows(number, device) : std::exchange(outputs[act.from], {}));
      }
    }
  }

 private:
  static constexpr std::size_t kData = -1;
  struct Act {
    bool backward;
    std::size_t call;
    std::size_t from = kData;
    std::size_t layer = 0;
  };
  std::vector<Act> all_;
  std::size_t calls_ = 0;
};

// Calls that autograd does not connect may be recorded once more in the second step. None is refused.
TEST_F(DrawnOrderTest, OfCallsRepeats) {
  for (const std::uint32_t seed : c10::irange(24U)) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const DrawnCalls calls(random);
    OffloadEngine engine(model_, options());
    const auto run = [&](CalledStack& model, std::int64_t s) { calls.run(model, s, device_); };
    expect_same_step(model_, &engine, plain_, 0, [&](CalledStack& model) { run(model, 0); });
    expect_replays(engine, 4, [&](CalledStack& model, std::int64_t s) { run(model, s + 1); });
  }
}

}  // namespace
}  // namespace sidestream::testing_model
