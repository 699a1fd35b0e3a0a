// Outputs of `ss::call` that only eager code takes before the next call: their memory is the next graph's, and an eager group that saves
// one takes it along from the first step on. The same steps as in plain training, bit for bit.
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "graphs/outputs/storage_holders.h"
#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "models/wave.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/report.h"
#include "sidestream/scope.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream::testing_model {
namespace {

/// Calls with eager code between them, which alone takes their outputs.
class OutputBetweenCallsTest : public testing::Test {
 protected:
  static constexpr std::int64_t kLayers = Waves::kCount;
  static constexpr std::int64_t kOutputBytes = 16 * kHidden * 4;
  using Between = std::function<at::Tensor(const at::Tensor& output)>;

  [[nodiscard]] Options options() const { return Options(device_).graph("waves.*").min_bytes(1024); }

  /// Saves what it is given, and a tensor of its own.
  static at::Tensor gate(const at::Tensor& output) {
    const OffloadScope scope("between");
    return output.cos().mul(output);
  }
  /// Saves what it is given alone.
  static at::Tensor cosine(const at::Tensor& output) {
    const OffloadScope scope("between");
    return output.cos();
  }
  /// Saves nothing.
  static at::Tensor halve(const at::Tensor& output) { return output * 0.5; }

  /// Steps [first, last) beside plain training. `hold` is asked, for each call, whether its output is kept until the step's end.
  void expect_plain(std::int64_t first, std::int64_t last, const Between& between,
                    const std::function<bool(std::int64_t layer)>& hold = {}, std::int64_t microbatches = 1) {
    for (std::int64_t s = first; s < last; ++s) {
      expect_same_step(model_, &*engine_, plain_, s, [&](Waves& model) {
        std::vector<at::Tensor> inputs;
        std::vector<at::Tensor> losses;
        std::vector<at::Tensor> held;
        for (std::int64_t microbatch = 0; microbatch < microbatches; ++microbatch) {
          inputs.push_back(rows(s * microbatches + microbatch, device_).requires_grad_(true));
          at::Tensor h = inputs.back();
          for (std::int64_t i = 0; i < kLayers; ++i) {
            h = call(&*model.layer(i), h);
            if (hold && hold(i)) {
              held.push_back(h.detach());
            }
            h = between(h);
          }
          losses.push_back(h.mean());
        }
        StepTensors given = values(held);
        for (at::Tensor& loss : losses) {
          loss.backward();
        }
        for (const at::Tensor& input : inputs) {
          held.push_back(input.grad());
        }
        const StepTensors behind_backward = values(held);
        given.insert(given.end(), behind_backward.begin(), behind_backward.end());
        return given;
      });
    }
  }
  /// Step `s` of functions that read one weight, beside plain training. `pass` gives the loss, and what it keeps.
  using Pass = std::function<std::pair<at::Tensor, at::Tensor>(const at::Tensor& x, const at::Tensor& w)>;
  void expect_plain_pass(std::int64_t s, const Pass& pass) {
    const at::Tensor w = model_.layer(0)->parameters()[0];
    const auto train = [&](OffloadEngine* engine) {
      w.mutable_grad() = at::Tensor();
      const at::Tensor x = rows(s, device_).requires_grad_(true);
      at::Tensor kept;
      in_step(engine, [&] {
        at::Tensor loss;
        std::tie(loss, kept) = pass(x, w);
        loss.backward();
      });
      return values({x.grad(), w.grad(), kept});
    };
    EXPECT_TRUE(same(train(&*engine_), train(nullptr))) << "step " << s;
    EXPECT_EQ(engine_->report().unplanned_bytes, 0) << "step " << s;
  }
  static bool every(std::int64_t /*layer*/) { return true; }
  /// What an engine and its graphs keep of the device behind four steps. `hold`: in the first step.
  [[nodiscard]] std::int64_t kept_bytes(const Options& options, const Between& between,
                                        const std::function<bool(std::int64_t layer)>& hold = {}) {
    await_end_of_backward(device_);   // of the test before this one
    const sim::OneThread one_thread;  // autograd's own frees the last tensors of a backward a moment later
    synchronize(device_);
    engine_.reset();
    release_cached_memory(device_);
    engine_.emplace(model_, options);
    expect_plain(0, 1, between, hold);
    synchronize(device_);
    const std::int64_t before = memory_use(device_).allocated;
    expect_plain(1, 4, between);
    synchronize(device_);
    return memory_use(device_).allocated - before;
  }
  [[nodiscard]] GroupReport last_group(const std::string& name) const {
    GroupReport last;
    for (const GroupReport& group : engine_->report().groups) {
      last = group.name == name ? group : last;
    }
    return last;
  }

  c10::Device device_ = find_device("sim");
  Waves model_{device_};
  Waves plain_{device_};
  std::optional<OffloadEngine> engine_;
};

TEST_F(OutputBetweenCallsTest, IsNotKeptByTheSequence) {
  const std::int64_t held = kept_bytes(options(), halve, every);
  const std::int64_t freed = kept_bytes(options(), halve);
  EXPECT_EQ(held - freed, (kLayers - 1) * kOutputBytes) << "all but the last call's";
  EXPECT_EQ(engine_->report().outputs_copied, 0);
}

TEST_F(OutputBetweenCallsTest, IsOffloadedWithTheGroupThatSavesIt) {
  engine_.emplace(model_, options().offload("between"));
  expect_plain(0, 1, gate);
  EXPECT_EQ(engine_->report().offloaded_bytes, 2 * kLayers * kOutputBytes) << "like any storage in the first step";
  for (std::int64_t s = 1; s < 5; ++s) {
    expect_plain(s, s + 1, gate);
    const Report report = engine_->report();
    EXPECT_GT(report.replays, 0);
    EXPECT_EQ(report.unplanned_bytes, 0);
    EXPECT_EQ(report.refused_bytes, 0);
    EXPECT_GE(report.offloaded_bytes, 2 * (kLayers - 3) * kOutputBytes);
    EXPECT_EQ(report.reloaded_bytes, report.offloaded_bytes);
    EXPECT_EQ(report.pinned_allocations_after_planning, 0);
    EXPECT_EQ(report.outputs_copied, 0);
  }
}

// Eager code of a group that stays has the output anyway: no other memory is taken for it.
TEST_F(OutputBetweenCallsTest, IsKeptWhereWhatSavesItStays) {
  const std::int64_t held = kept_bytes(options(), halve, every);
  EXPECT_EQ(kept_bytes(options(), gate), held) << "nothing leaves";
  EXPECT_EQ(engine_->report().outputs_copied, 0);
  EXPECT_EQ(kept_bytes(options().offload("between").lag(std::size_t{1} << 20), gate), held)
      << "all is needed immediately";
  EXPECT_EQ(engine_->report().outputs_copied, 0);
  EXPECT_EQ(engine_->report().unplanned_bytes, 0);
  const std::int64_t freed = kept_bytes(options().offload("between"), gate);
  EXPECT_EQ(held - freed, (kLayers - 2) * kOutputBytes) << "the last group is needed immediately";
}

TEST_F(OutputBetweenCallsTest, IsKeptByGraphsWhoseBackwardMayRunTwice) {
  const GraphOptions retained = GraphOptions().retain_graph_in_backward(true);
  const std::int64_t held = kept_bytes(options().graph_options(retained), halve, every);
  EXPECT_EQ(kept_bytes(options().graph_options(retained), halve), held);
  engine_.emplace(model_, options().offload("between").graph_options(retained));
  expect_plain(0, 4, gate);
  EXPECT_EQ(engine_->report().unplanned_bytes, 0);
  EXPECT_EQ(engine_->report().outputs_copied, 0);
  EXPECT_EQ(last_group("between").bytes, 2 * kOutputBytes);
  EXPECT_GT(engine_->report().offloaded_bytes, 0) << "what the groups make themselves";
}

TEST_F(OutputBetweenCallsTest, WhoHoldsItLaterHasIt) {
  for (const bool leaves : {false, true}) {
    engine_.emplace(model_, leaves ? options().offload("between") : options());
    const Between between = leaves ? gate : halve;
    expect_plain(0, 2, between);
    EXPECT_EQ(engine_->report().outputs_copied, 0);
    expect_plain(2, 4, between, every);
    EXPECT_GE(engine_->report().outputs_copied, kLayers - 2);
    EXPECT_EQ(engine_->report().outputs_copied_bytes, engine_->report().outputs_copied * kOutputBytes);
    expect_plain(4, 5, between, [](std::int64_t layer) { return layer == 2; });
    expect_plain(5, 7, between);
    EXPECT_EQ(engine_->report().outputs_copied, 0);
  }
}

TEST_F(OutputBetweenCallsTest, WhoHoldsItFromTheFirstStepOnHasIt) {
  const auto some = [](std::int64_t layer) { return layer % 2 == 0; };
  engine_.emplace(model_, options());
  expect_plain(0, 4, halve, some);
  for (const Between& between : {Between(gate), Between(cosine)}) {
    engine_.emplace(model_, options().offload("between"));
    expect_plain(0, 4, between, some);
    EXPECT_EQ(engine_->report().unplanned_bytes, 0);
    EXPECT_GT(engine_->report().offloaded_bytes, 0);
  }
}

TEST_F(OutputBetweenCallsTest, StaysWhereNoPinnedMemoryIsFree) {
  engine_.emplace(model_, options().offload("between").host_cap(3 * kOutputBytes));
  expect_plain(0, 4, gate);
  EXPECT_LE(engine_->report().offloaded_bytes, 3 * kOutputBytes);
}

TEST_F(OutputBetweenCallsTest, VerifiedReplays) {
  engine_.emplace(model_, options().offload("between").verify_replays(3));
  expect_plain(0, 5, gate);
  EXPECT_GT(engine_->report().verified_backwards, 0);
}

TEST_F(OutputBetweenCallsTest, MicrobatchesInFlight) {
  for (const bool leaves : {false, true}) {
    engine_.emplace(model_, leaves ? options().offload("between") : options());
    expect_plain(0, 4, leaves ? gate : halve, {}, 2);
    EXPECT_EQ(engine_->report().unplanned_bytes, 0);
    EXPECT_EQ(engine_->report().outputs_copied, 0);
    expect_plain(4, 6, leaves ? gate : halve, every, 2);
    EXPECT_GE(engine_->report().outputs_copied, 2 * (kLayers - 2));
  }
}

// Some passes leave calls out: what is let go of is judged by all of them. The output of a pass's last call is held until its backward.
TEST_F(OutputBetweenCallsTest, PassesOneBehindTheOther) {
  for (const bool leaves : {false, true}) {
    engine_.emplace(model_, leaves ? options().offload("between") : options());
    for (std::int64_t s = 0; s < 4; ++s) {
      expect_same_step(model_, &*engine_, plain_, s, [&](Waves& model) {
        StepTensors given;
        for (const std::int64_t layers : {kLayers, std::int64_t{3}, kLayers}) {
          const at::Tensor x = rows(3 * s + layers, device_, given.empty() ? 0 : 1).requires_grad_(true);
          at::Tensor h = x;
          at::Tensor last;
          for (std::int64_t i = 0; i < layers; ++i) {
            h = call(&*model.layer(i), h);
            last = i + 1 == layers ? h.detach() : last;
            h = leaves ? gate(h) : halve(h);
          }
          h.mean().backward();
          given.emplace_back("input", x.grad());
          given.emplace_back("last", last);
        }
        return given;
      });
      EXPECT_EQ(engine_->report().unplanned_bytes, 0);
      EXPECT_EQ(engine_->report().outputs_copied, 0);
      EXPECT_EQ(engine_->report().offloaded_bytes > 0, leaves);
    }
  }
}

// The next call's graphs save it beside the head: the head's group is planned as if it alone did.
TEST_F(OutputBetweenCallsTest, AnOutputThatTheNextCallSavesTooIsPlannedWithItsGroup) {
  for (const char* const offload : {"heads", "heads,calls.*"}) {
    engine_.emplace(model_, Options(device_).graph("calls.*").min_bytes(1024).offload(offload));
    const auto body = [](const at::Tensor& h, const at::Tensor& w) { return (h * w).sin(); };
    for (std::int64_t s = 0; s < 4; ++s) {
      expect_plain_pass(s, [&](const at::Tensor& x, const at::Tensor& w) {
        at::Tensor h = x;
        at::Tensor loss = x.mean();
        for (const char* const name : {"calls.0", "calls.1", "calls.2", "calls.3", "calls.4", "calls.5"}) {
          h = call(name, body, h, w);
          const OffloadScope scope("heads");
          loss = loss + h.cos().mul(h).mean();
        }
        return std::pair(loss, at::Tensor());
      });
      EXPECT_GE(engine_->report().offloaded_bytes, 2 * 3 * kOutputBytes) << "step " << s << " " << offload;
    }
  }
}

// It keeps none when it is recorded, and one from the capture's first pass on: that one stays where it is.
TEST_F(OutputBetweenCallsTest, AnOutputThatABodyKeepsFromTheCaptureOn) {
  const auto runs = std::make_shared<int>(0);
  const auto kept = std::make_shared<at::Tensor>();
  const auto body = owning([runs, kept](const at::Tensor& h, const at::Tensor& w) {
    const at::Tensor y = (h + w).sin();
    *kept = ++*runs > 1 ? y.detach() : at::Tensor();
    return y;
  });
  engine_.emplace(model_, Options(device_).graph("calls.*").min_bytes(1024));
  const auto train = [&](OffloadEngine* engine, std::int64_t s) {
    const at::Tensor w = model_.layer(0)->parameters()[0];
    w.mutable_grad() = at::Tensor();
    const at::Tensor x = rows(s, device_).requires_grad_(true);
    in_step(engine, [&] {
      at::Tensor h = halve(call("calls.0", body, x, w));
      h = halve(call(
          "calls.1", [](const at::Tensor& in) { return in.sin(); }, h));
      h.mean().backward();
    });
    return StepTensors{{"x", x.grad()}, {"w", w.grad()}};
  };
  const StepTensors first = train(&*engine_, 0);
  const StepTensors second = train(&*engine_, 1);
  const StepTensors third = train(&*engine_, 2);
  EXPECT_EQ(engine_->report().replays, 4);
  const at::Tensor read = kept->cpu();
  EXPECT_TRUE(same(first, train(nullptr, 0)));
  EXPECT_TRUE(same(second, train(nullptr, 1)));
  EXPECT_TRUE(same(third, train(nullptr, 2)));
  EXPECT_TRUE(at::equal(read, kept->cpu()));
}

TEST_F(OutputBetweenCallsTest, TheLastCallsOutputIsReportedAsTheGraphs) {
  engine_.emplace(model_, options().offload("between").lag(0));
  expect_plain(0, 3, gate);
  const GroupReport last = last_group("between");
  EXPECT_EQ(last.kept_because,
            "it is an output of a graph, and the graph keeps its memory; backward needs it immediately");
  EXPECT_EQ(last.bytes, 2 * kOutputBytes);
}

// Backward of the call reads the output. Where the graphs keep it until then, to take it along would free nothing.
TEST_F(OutputBetweenCallsTest, AnOutputThatItsOwnCallSavesStaysWithIt) {
  struct Case {
    const char* offload;
    std::optional<std::size_t> lag;
    std::vector<std::int64_t> offloaded;  ///< by groups between, in outputs
  };
  for (const auto& [offload, lag, expected] :
       {Case{"between", {}, {1, 1, 1, 1, 0, 0}}, Case{"**", {}, {2, 2, 2, 2, 0, 0}},
        Case{"**", 4 * kOutputBytes, {2, 2, 1, 1, 0, 0}}}) {
    Options with = Options(device_).graph("calls.*").min_bytes(1024).offload(offload);
    with.lag(lag);  // as much as two groups and four calls save
    engine_.emplace(model_, with);
    const auto body = [](const at::Tensor& h, const at::Tensor& w) { return (h * w).tanh(); };
    for (std::int64_t s = 0; s < 4; ++s) {
      expect_plain_pass(s, [&](const at::Tensor& x, const at::Tensor& w) {
        at::Tensor h = x;
        for (const char* const name : {"calls.0", "calls.1", "calls.2", "calls.3", "calls.4", "calls.5"}) {
          h = gate(call(name, body, h, w));
        }
        return std::pair(h.mean(), at::Tensor());
      });
      EXPECT_EQ(engine_->report().outputs_copied, 0);
    }
    std::vector<std::int64_t> offloaded;
    for (const GroupReport& group : engine_->report().groups) {
      if (group.name == "between") {
        offloaded.push_back(group.offloaded_bytes / kOutputBytes);
      }
    }
    EXPECT_EQ(offloaded, expected) << offload;
  }
}

// One storage: the part that is held holds the other.
TEST_F(OutputBetweenCallsTest, TwoOutputsInOneStorage) {
  const auto halves = [](const at::Tensor& h, const at::Tensor& w) {
    const at::Tensor v = w.view_as(w);  // what a call adds up of an input, it adds up first
    const at::Tensor both = at::cat({h + v, h - v}, 1).sin();
    return std::make_pair(both.slice(1, 0, kHidden), both.slice(1, kHidden));
  };
  for (const bool holds : {false, true}) {
    engine_.emplace(model_, Options(device_).graph("calls.*").min_bytes(1024).offload("between"));
    for (std::int64_t s = 0; s < 4; ++s) {
      expect_plain_pass(s, [&](const at::Tensor& x, const at::Tensor& w) {
        at::Tensor h = x;
        at::Tensor kept;
        for (const char* const name : {"calls.0", "calls.1", "calls.2", "calls.3"}) {
          auto [left, right] = call(name, halves, h, w);
          h = gate(left) + right;
          kept = holds && s > 1 && !kept.defined() ? right : kept;
        }
        return std::pair(h.mean(), kept);
      });
      EXPECT_EQ(engine_->report().outputs_copied, holds && s > 1 ? 1 : 0) << "step " << s;
    }
  }
}

}  // namespace
}  // namespace sidestream::testing_model
