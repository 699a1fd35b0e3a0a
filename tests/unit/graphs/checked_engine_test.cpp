// The order of all that the engine asks of the device, by the journal: no finding on the clean engine, and each dropped wait of
// a step found.
#include <cstdint>
#include <cstdio>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "graphs/engine_state.h"
#include "runtime/checked_runtime.h"
#include "runtime/issued_at.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "unit/graphs/block_model.h"
#include "unit/graphs/layer_stack.h"
#include "unit/graphs/wrapping.h"

namespace sidestream {
namespace {

using testing_model::BlockModel;
using testing_model::Wrapping;

class CheckedEngineTest : public testing::TestWithParam<Wrapping> {
 protected:
  void SetUp() override { shape_.layers = 6; }

  void train(BlockModel& model, OffloadEngine& engine, std::int64_t first, std::int64_t last) const {
    for (std::int64_t s = first; s < last; ++s) {
      const auto batch = testing_model::batch_of(shape_, s, device_);
      testing_model::clear_gradients(model);
      {
        const auto step = engine.step();
        model.loss(batch.tokens, batch.targets).backward();
      }
      testing_model::descend(model);
    }
  }

  c10::Device device_ = find_device("sim");
  BlockModel::Shape shape_;
};

TEST_P(CheckedEngineTest, NothingIsUnordered) {
  BlockModel model(shape_);
  model.to(device_);
  OffloadEngine engine(model, GetParam().options(device_, 1024).check_steps(5));
  train(model, engine, 0, 6);
  const Report report = engine.report();
  EXPECT_GT(report.offloaded_bytes, 0);
  EXPECT_GT(report.checked_operations, 1000);
  EXPECT_EQ(report.order_findings, std::vector<std::string>());
}

INSTANTIATE_TEST_SUITE_P(
    Wrapped, CheckedEngineTest,
    testing::Values(
        Wrapping{"eager", "", "blocks.*.*"}, Wrapping{"eager_some", "", "blocks.*.core_attn,blocks.*.proj"},
        Wrapping{"graphs_1", "blocks.*", "blocks.*.*", 1}, Wrapping{"graphs_2", "blocks.*", "blocks.*.*", 2},
        Wrapping{"graphs_3", "blocks.*", "blocks.*.*", 3}, Wrapping{"graphs_4", "blocks.*", "blocks.*.*", 4},
        Wrapping{"graphs_2_accumulating", "blocks.*", "blocks.*.fc1,blocks.*.core_attn,blocks.*.proj", 2, true},
        Wrapping{"mixed", "blocks.1,blocks.2,blocks.4", "**", 2}, Wrapping{"mixed_1", "blocks.0,blocks.3", "**", 1}),
    [](const testing::TestParamInfo<Wrapping>& info) { return info.param.name; });

/// Leaves out all waits of one kind: told apart by where they are issued, by whom, and for what.
class DroppingRuntime final : public ForwardingRuntime {
 public:
  using ForwardingRuntime::ForwardingRuntime;

  void wait(c10::Stream stream, const Event& event) override {
    if (!drops(stream, "an event")) {
      inner().wait(stream, event);
    }
  }
  void wait(c10::Stream stream, const ExternalEvent& event) override {
    if (!drops(stream, "an event of a graph")) {
      inner().wait(stream, event);
    }
  }

  /// From here on waits of this kind are left out; empty: none.
  void drop(std::string kind) { dropped_ = std::move(kind); }
  /// The kinds met since the last call.
  [[nodiscard]] std::set<std::string> take_kinds() { return std::exchange(kinds_, {}); }

 private:
  bool drops(c10::Stream stream, const char* event) {
    const IssuedAt* place = IssuedAt::innermost();
    std::string kind = place == nullptr ? "elsewhere" : std::string(place->phase());
    kind += stream == inner().current_stream() ? ": the main stream waits for " : ": another stream waits for ";
    kind += event;
    const bool dropped = kind == dropped_;
    kinds_.insert(std::move(kind));
    return dropped;
  }
  std::set<std::string> kinds_;
  std::string dropped_;
};

class DroppedWaitTest : public CheckedEngineTest {
 protected:
  struct Outcome {
    std::set<std::string> kinds;  ///< of waits in the faulty step
    std::vector<std::string> findings;
  };

  /// Trains; in one step after the capture, waits of `kind` are left out.
  Outcome run(const std::string& kind) const {
    constexpr std::int64_t kFaulty = 3;
    const auto checked = std::make_shared<CheckedRuntime>(make_runtime(device_));
    const auto dropping = std::make_shared<DroppingRuntime>(checked);
    BlockModel model(shape_);
    model.to(device_);
    OffloadEngine engine(std::make_shared<EngineState>(model, GetParam().options(device_, 1024), dropping));
    Outcome outcome;
    for (std::int64_t s = 0; s <= kFaulty + 1; ++s) {
      checked->begin_step(static_cast<std::uint64_t>(s + 1));
      const OperatorObserverGuard observing([&](const OperatorAccess& access) { checked->observe(access); });
      (void)dropping->take_kinds();
      dropping->drop(s == kFaulty ? kind : std::string());
      train(model, engine, s, s + 1);
      if (s == kFaulty) {
        outcome.kinds = dropping->take_kinds();
      }
    }
    outcome.findings = checked->findings();
    return outcome;
  }

  /// Waits that other waits of a whole step stand in for; programs that leave forwards out, stop a backward, use several
  /// streams or end without Step need them (EagerStreams, SkippedLayersScheduleTest and others show each).
  static bool stands_alone(const std::string& kind) {
    return kind != "forward: another stream waits for an event of a graph" &&   // the backward's tail
           kind != "backward: another stream waits for an event of a graph" &&  // copies of the last K layers: none
           kind.rfind("elsewhere: the main stream waits for an event of a graph", 0) != 0 &&  // the step's end
           kind !=
               "elsewhere: another stream waits for an event";  // the step's end, for streams that are not the current one
  }
};

TEST_P(DroppedWaitTest, IsFound) {
  const Outcome clean = run("");
  ASSERT_EQ(clean.findings, std::vector<std::string>());
  ASSERT_GE(clean.kinds.size(), 4U);
  for (const std::string& kind : clean.kinds) {
    const Outcome outcome = run(kind);
    std::printf("%s | %s | %s\n", GetParam().name.c_str(), kind.c_str(),
                outcome.findings.empty() ? "not found" : outcome.findings.front().c_str());
    EXPECT_EQ(outcome.findings.empty(), !stands_alone(kind)) << kind;
  }
}

INSTANTIATE_TEST_SUITE_P(Wrapped, DroppedWaitTest,
                         testing::Values(Wrapping{"eager", "", "blocks.*.*"},
                                         Wrapping{"graphs_1", "blocks.*", "blocks.*.*", 1},
                                         Wrapping{"graphs_2", "blocks.*", "blocks.*.*", 2},
                                         Wrapping{"graphs_3", "blocks.*", "blocks.*.*", 3},
                                         Wrapping{"mixed", "blocks.1,blocks.2,blocks.4", "**", 2}),
                         [](const testing::TestParamInfo<Wrapping>& info) { return info.param.name; });

}  // namespace
}  // namespace sidestream
