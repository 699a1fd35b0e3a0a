// Which step is traced, and what the trace says of its graphs, copies, waits and memory.
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "expect_throws.h"
#include "graphs/engine/engine_access.h"
#include "runtime/forwarding_runtime.h"
#include "sidestream/error.h"
#include "sidestream/owning.h"
#include "unit/graphs/call_fixture.h"

namespace sidestream::testing_model {
namespace {

/// A device whose clock moves by 1 ms at each timing event and by 10 ms at each wait for an event. Other events take no time.
class TickingRuntime final : public ForwardingRuntime {
 public:
  using ForwardingRuntime::ForwardingRuntime;

  [[nodiscard]] bool keeps_time() const noexcept override { return true; }
  [[nodiscard]] Event create_event(EventTiming timing) override {
    Event event = ForwardingRuntime::create_event(timing);
    if (timing == EventTiming::on) {
      ++timing_events_;
      at_[event.native()] = 0;
    } else {
      at_.erase(event.native());
    }
    return event;
  }
  void record(const Event& event, c10::Stream stream) override {
    ForwardingRuntime::record(event, stream);
    if (const auto timed = at_.find(event.native()); timed != at_.end()) {
      timed->second = ++now_;
    }
  }
  void record(const ExternalEvent& event, c10::Stream stream) override { ForwardingRuntime::record(event, stream); }
  void wait(c10::Stream stream, const Event& event) override {
    ForwardingRuntime::wait(stream, event);
    now_ += 10;
  }
  void wait(c10::Stream stream, const ExternalEvent& event) override { ForwardingRuntime::wait(stream, event); }
  [[nodiscard]] double elapsed_ms(const Event& begin, const Event& end) override {
    return static_cast<double>(at_.at(end.native()) - at_.at(begin.native()));
  }

  [[nodiscard]] std::int64_t timing_events() const noexcept { return timing_events_; }

 private:
  std::map<const void*, std::int64_t> at_;
  std::int64_t now_ = 0;
  std::int64_t timing_events_ = 0;
};

/// By a field of the events: how often.
std::map<std::string, int> events_by(const nlohmann::json& trace, const char* kind, const char* field) {
  std::map<std::string, int> counts;
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("ph") == kind) {
      ++counts[event.at(field).dump()];
    }
  }
  return counts;
}

class StepTraceTest : public CallTest {
 protected:
  [[nodiscard]] Options offloading() const { return options().lag(0).lookahead(0); }
  static nlohmann::json trace_of(const OffloadEngine& engine) { return nlohmann::json::parse(engine.trace_json()); }
};

TEST_F(StepTraceTest, TheSecondStepOfTheCapturesIsTraced) {
  OffloadEngine engine(model_, offloading());
  for (std::int64_t s = 0; s < 2; ++s) {
    expect_plain(engine, s, s + 1);
    EXPECT_EQ(engine.report().traced_step, 0);
    EXPECT_THROWS(UsageError, "no step has been traced", (void)engine.trace_json());
  }
  expect_plain(engine, 2, 6);
  EXPECT_EQ(engine.report().traced_step, 3);
  engine.reset();
  expect_plain(engine, 6, 9);
  EXPECT_EQ(engine.report().traced_step, 9) << "of the new captures";
}

TEST_F(StepTraceTest, WhileAStepIsTracedTheOneBeforeIsReported) {
  OffloadEngine engine(model_, offloading());
  expect_plain(engine, 0, 3);
  engine.reset();
  expect_plain(engine, 3, 5);
  {
    const Step step = engine.step();
    const at::Tensor loss = model_.loss_of(5, 0);
    EXPECT_EQ(engine.report().traced_step, 3);
    EXPECT_FALSE(trace_of(engine).at("traceEvents").empty());
    loss.backward();
  }
  EXPECT_EQ(engine.report().traced_step, 6);
}

TEST_F(StepTraceTest, AnEagerEngineIsTracedOnce) {
  OffloadEngine engine(model_, Options(device_).min_bytes(1024).offload("blocks.*.*").lag(0).lookahead(0));
  expect_plain(engine, 0, 6);
  const Report report = engine.report();
  EXPECT_EQ(report.traced_step, 3);
  std::int64_t offloaded = 0;
  std::int64_t reloaded = 0;
  for (const TimesReport& times : report.times) {
    EXPECT_FALSE(times.name.empty());
    offloaded += times.offloaded_bytes;
    reloaded += times.reloaded_bytes;
  }
  EXPECT_EQ(offloaded, report.offloaded_bytes);
  EXPECT_EQ(reloaded, report.reloaded_bytes);
  EXPECT_GT(offloaded, 0);
  std::int64_t peak = 0;
  const nlohmann::json trace = trace_of(engine);
  for (const auto& event : trace.at("traceEvents")) {
    peak = event.at("ph") == "C" ? std::max(peak, event.at("args").at("bytes").get<std::int64_t>()) : peak;
  }
  EXPECT_EQ(peak, report.step_peak_bytes);
  engine.reset();
  expect_plain(engine, 6, 10);
  EXPECT_EQ(engine.report().traced_step, 9) << "once more after a reset";
}

TEST_F(StepTraceTest, AGraphedStepHasItsGraphsCopiesAndMemory) {
  OffloadEngine engine(model_, offloading());
  expect_plain(engine, 0, 5);
  const Report report = engine.report();
  const nlohmann::json trace = trace_of(engine);
  auto spans = events_by(trace, "X", "tid");
  EXPECT_EQ(spans["1"], report.replays);
  std::map<std::string, std::int64_t> bytes;
  std::int64_t peak = 0;
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("ph") == "X" && event.at("args").contains("bytes")) {
      bytes[event.at("tid").dump()] += event.at("args").at("bytes").get<std::int64_t>();
    } else if (event.at("ph") == "C") {
      peak = std::max(peak, event.at("args").at("bytes").get<std::int64_t>());
    }
  }
  EXPECT_EQ(bytes["2"], report.offloaded_bytes);
  EXPECT_EQ(bytes["3"], report.reloaded_bytes);
  EXPECT_GT(report.offloaded_bytes, 0);
  EXPECT_EQ(peak, report.step_peak_bytes);
  for (const GroupReport& group : report.groups) {
    const auto is_it = [&](const TimesReport& times) { return times.name == group.name; };
    const auto times = std::find_if(report.times.begin(), report.times.end(), is_it);
    const std::int64_t moved = times == report.times.end() ? 0 : times->offloaded_bytes;
    EXPECT_EQ(moved, group.offloaded_bytes) << group.name << ": moved as planned";
  }
}

TEST_F(StepTraceTest, WaitsAreMeasuredInThatStepAlone) {
  const auto runtime = std::make_shared<TickingRuntime>(make_runtime(device_));
  OffloadEngine engine = EngineAccess::engine(model_, offloading(), runtime);
  expect_plain(engine, 0, 2);
  const std::int64_t of_captures = runtime->timing_events();
  expect_plain(engine, 2, 3);
  const std::int64_t in_step = runtime->timing_events();
  EXPECT_GT(in_step, of_captures);
  const Report report = engine.report();
  expect_plain(engine, 3, 6);
  EXPECT_EQ(runtime->timing_events(), in_step) << "after it";
  // A wait takes 10 ms by that clock, and its second mark 1 ms. At the step's end there are several waits, or none.
  double waited = 0;
  std::int64_t waits = 0;
  for (const TimesReport& times : report.times) {
    if (times.name == "(end of the step)") {
      continue;
    }
    waited += times.waited_seconds;
    waits += static_cast<std::int64_t>(1e3 * times.waited_seconds + 0.5) / 11;
  }
  EXPECT_NEAR(waited, 0.011 * static_cast<double>(waits), 1e-9);
  EXPECT_EQ(waits, report.waits);
  EXPECT_GT(waits, 0);
  EXPECT_GT(report.traced_seconds, report.waited_seconds);
}

TEST_F(StepTraceTest, AStepThatFailedIsNoTrace) {
  OffloadEngine engine(model_, offloading());
  expect_plain(engine, 0, 2);
  try {
    const Step step = engine.step();
    (void)model_.loss_of(2, 0);
    throw std::runtime_error("a user's");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(engine.report().traced_step, 0);
  EXPECT_THROWS(UsageError, "no step has been traced", (void)engine.trace_json());
  expect_plain(engine, 3, 4);
  EXPECT_EQ(engine.report().traced_step, 3) << "the step after it, which is the third that went well";
}

/// With weight gradients that are delayed, or not.
class StepTraceOfChunksTest : public StepTraceTest, public testing::WithParamInterface<bool> {
 protected:
  [[nodiscard]] Options delaying() const {
    const GraphOptions delayed = GraphOptions().gradients("**", GradientPolicy::delayed);
    return options(GetParam() ? delayed : GraphOptions()).lag(0).lookahead(0);
  }
};

TEST_P(StepTraceOfChunksTest, CopiesAndWaitsBelongToTheChunkOfTheirCall) {
  OffloadEngine engine(model_, delaying());
  using Kind = PipelineStep::Kind;
  const std::vector<PipelineStep> order = {
      {0, 0, Kind::forward}, {0, 1, Kind::forward}, {0, 0, Kind::backward}, {0, 1, Kind::backward}};
  for (std::int64_t s = 0; s < 5; ++s) {
    const Step step = engine.step(order);
    std::map<std::int64_t, at::Tensor> losses;
    for (const PipelineStep& work : order) {
      if (work.kind == Kind::forward) {
        const Chunk chunk = engine.chunk({work.stage, work.microbatch});
        losses[work.microbatch] = model_.loss_of(2 * s + work.microbatch, 0);
      } else {
        losses[work.microbatch].backward();
        engine.backward_dw({work.stage, work.microbatch});
      }
    }
  }
  const Report report = engine.report();
  ASSERT_EQ(report.chunks.size(), 2U);
  std::map<std::int64_t, std::pair<std::int64_t, std::int64_t>> moved;  // by microbatch: to the host, to the device
  const nlohmann::json trace = trace_of(engine);
  for (const auto& event : trace.at("traceEvents")) {
    if (event.at("ph") == "X" && event.at("name") != "(end of the step)") {
      ASSERT_TRUE(event.at("args").contains("microbatch")) << event;
    }
    if (event.at("ph") == "X" && event.at("args").contains("bytes")) {
      auto& bytes = moved[event.at("args").at("microbatch").get<std::int64_t>()];
      (event.at("tid") == 2 ? bytes.first : bytes.second) += event.at("args").at("bytes").get<std::int64_t>();
    }
  }
  for (const ChunkReport& chunk : report.chunks) {
    EXPECT_EQ(moved[chunk.microbatch].first, chunk.offloaded_bytes) << chunk.microbatch;
    EXPECT_EQ(moved[chunk.microbatch].second, chunk.offloaded_bytes) << chunk.microbatch << ", reloaded";
    EXPECT_GT(chunk.offloaded_bytes, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Weights, StepTraceOfChunksTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "delayed" : "at_once"; });

}  // namespace
}  // namespace sidestream::testing_model
