#include "analysis/traced_step.h"

#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace sidestream {
namespace {

/// Two layers, the second in a chunk; a copy begins before the step does on the device.
TracedStep timed_step() {
  TracedStep step;
  step.number = 3;
  step.timed = true;
  step.seconds = 0.5;
  step.tracing = 0.001;
  step.spans = {{SpanKind::forward, "a", 0.0, 0.125},
                {SpanKind::offload, "a.mlp", -0.25, 0.0, 100},
                {SpanKind::forward, "b", 0.125, 0.25, 0, 1, 2},
                {SpanKind::offload, "b", 0.25, 0.375, 50, 1, 2},
                {SpanKind::wait, "b", 0.25, 0.3125, 0, 1, 2},
                {SpanKind::reload, "b", 0.375, 0.4375, 50, 1, 2},
                {SpanKind::backward, "b", 0.375, 0.4375, 0, 1, 2},
                {SpanKind::weights, "b", 0.4375, 0.5, 0, 1, 2},
                {SpanKind::wait, "(end of the step)", 0.5, 0.5}};
  step.memory = {{0.0, 1000}, {0.25, 3000}, {0.5, 500}};
  return step;
}

TEST(TracedStepTest, TimesAddUpByNameAndByChunk) {
  Report report;
  report.chunks = {{0, 0, 0}, {1, 2, 50}};
  add_times(timed_step(), report);
  EXPECT_EQ(report.traced_step, 3);
  EXPECT_EQ(report.traced_seconds, 0.5);
  EXPECT_EQ(report.tracing_seconds, 0.001);
  EXPECT_EQ(report.waited_seconds, 0.0625);
  EXPECT_EQ(report.offload_seconds, 0.375);
  EXPECT_EQ(report.reload_seconds, 0.0625);
  ASSERT_EQ(report.times.size(), 4U);
  const TimesReport& b = report.times[2];
  EXPECT_EQ(b.name, "b");
  EXPECT_EQ(b.forward_seconds, 0.125);
  EXPECT_EQ(b.backward_seconds, 0.125) << "with its weight gradients";
  EXPECT_EQ(b.waited_seconds, 0.0625);
  EXPECT_EQ(b.offload_seconds, 0.125);
  EXPECT_EQ(b.reload_seconds, 0.0625);
  EXPECT_EQ(b.offloaded_bytes, 50);
  EXPECT_EQ(b.reloaded_bytes, 50);
  EXPECT_EQ(report.times[1].name, "a.mlp");
  EXPECT_EQ(report.times[1].offloaded_bytes, 100);
  EXPECT_EQ(report.chunks[0].offload_seconds, 0);
  EXPECT_EQ(report.chunks[1].offload_seconds, 0.125);
  EXPECT_EQ(report.chunks[1].reload_seconds, 0.0625);
  EXPECT_EQ(report.chunks[1].waited_seconds, 0.0625);
}

TEST(TracedStepTest, WithoutAClockThereAreBytesAndNoTimes) {
  TracedStep step = timed_step();
  step.timed = false;
  step.seconds = 0;
  Report report;
  report.chunks = {{1, 2, 50}};
  add_times(step, report);
  EXPECT_EQ(report.times[2].offloaded_bytes, 50);
  for (const TimesReport& times : report.times) {
    EXPECT_EQ(times.forward_seconds + times.backward_seconds + times.waited_seconds, 0) << times.name;
    EXPECT_EQ(times.offload_seconds + times.reload_seconds, 0) << times.name;
  }
  EXPECT_EQ(report.waited_seconds + report.offload_seconds + report.reload_seconds, 0);
  EXPECT_EQ(report.chunks[0].waited_seconds, 0);
}

TEST(TracedStepTest, TheTraceHasEachSpanInItsRowAndTheMemory) {
  const auto trace = nlohmann::json::parse(chrome_trace(timed_step()));
  std::map<int, std::string> rows;
  std::map<std::string, std::vector<std::string>> spans;
  std::vector<std::pair<double, std::int64_t>> memory;
  for (const auto& event : trace.at("traceEvents")) {
    const std::string kind = event.at("ph");
    if (kind == "M" && event.at("name") == "thread_name") {
      rows[event.at("tid")] = event.at("args").at("name");
    } else if (kind == "X") {
      EXPECT_GE(event.at("ts"), 0);
      EXPECT_GE(event.at("dur"), 0);
      spans[rows.at(event.at("tid"))].push_back(event.at("name"));
      if (event.at("name") == "b forward") {
        EXPECT_EQ(event.at("ts"), 375000) << "microseconds since the first copy began";
        EXPECT_EQ(event.at("dur"), 125000);
        EXPECT_EQ(event.at("args"), (nlohmann::json{{"stage", 1}, {"microbatch", 2}}));
      }
    } else if (kind == "C") {
      memory.emplace_back(event.at("ts"), event.at("args").at("bytes"));
    }
  }
  EXPECT_EQ(spans["graphs"], (std::vector<std::string>{"a forward", "b forward", "b backward", "b weight gradients"}));
  EXPECT_EQ(spans["copies to the host"], (std::vector<std::string>{"a.mlp", "b"}));
  EXPECT_EQ(spans["copies to the device"], (std::vector<std::string>{"b"}));
  EXPECT_EQ(spans["compute waits for copies"], (std::vector<std::string>{"b", "(end of the step)"}));
  EXPECT_EQ(memory, (std::vector<std::pair<double, std::int64_t>>{{250000, 1000}, {500000, 3000}, {750000, 500}}));
}

TEST(TracedStepTest, ANameThatIsNoTextDoesNotStopTheTrace) {
  TracedStep step;
  step.spans = {{SpanKind::forward, "block\xff", 0, 1}};
  EXPECT_TRUE(nlohmann::json::accept(chrome_trace(step)));
}

}  // namespace
}  // namespace sidestream
