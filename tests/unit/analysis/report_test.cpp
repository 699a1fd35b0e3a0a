#include "sidestream/report.h"

#include <sstream>
#include <string>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace sidestream {
namespace {

/// Every field its own value, so that no two can be taken for one another.
Report full_report() {
  Report report;
  report.steps = 3;
  report.offloaded_bytes = 8 << 20;
  report.reloaded_bytes = 7 << 20;
  report.saved_bytes = 16 << 20;
  report.unseen_bytes = 1 << 20;
  report.copied_twice_bytes = 2 << 20;
  report.unplanned_bytes = 9 << 20;
  report.refused_bytes = 6 << 20;
  report.pinned_bytes = 12 << 20;
  report.pinned_requested_bytes = 11 << 20;
  report.host_cap = 64 << 20;
  report.waits = 21;
  report.inline_reloads = 22;
  report.captures = 23;
  report.recaptures = 24;
  report.replays = 25;
  report.eager_calls = 26;
  report.outputs_reused = 29;
  report.outputs_copied = 30;
  report.outputs_copied_bytes = 9 << 20;
  report.gradients_copied = 32;
  report.gradients_copied_bytes = 15 << 20;
  report.unused_outputs = 31;
  report.external_bytes = 5 << 20;
  report.graph_bytes = 13 << 20;
  report.warm_up_bytes = 14 << 20;
  report.sizing_peak_bytes = 40 << 20;
  report.first_step_peak_bytes = 36 << 20;
  report.step_peak_bytes = 34 << 20;
  report.in_flight_bytes = 2 << 20;
  report.verified_forwards = 29;
  report.verified_backwards = 30;
  report.checked_operations = 27;
  report.order_findings = {"nothing orders a with b"};
  report.syncs_found = 46;
  report.syncs_unlisted = 2;
  report.syncs = {
      {"value read on the host", "aten::item", "blocks.0", "blocks.0.mlp", "MulBackward0", {"f", "g"}, 41, "keep it"},
      {"blocking copy", "aten::copy_", "", "", "", {}, 3, "pin it"}};
  report.chunks = {{0, 0, 3 << 20, 0.25, 0.5, 0.75}, {0, 1, 5 << 20}, {1, 0, 2 << 20}};
  report.groups = {{"blocks.0", 4 << 20, 4 << 20, ""}, {"blocks.1", 6 << 20, 3 << 20, "over the host cap", 1 << 20}};
  report.traced_step = 2;
  report.traced_seconds = 0.047;
  report.waited_seconds = 0.048;
  report.offload_seconds = 0.049;
  report.reload_seconds = 0.051;
  report.tracing_seconds = 0.052;
  report.times = {{"blocks.0", 0.001, 0.002, 0.003, 0.004, 0.005, 53 << 20, 54 << 20}, {"blocks.1", 0.006}};
  report.exclusions = {{"small", 28, 3 << 20}};
  report.notes = {"a note"};
  return report;
}

std::string printed(const Report& report) {
  std::ostringstream out;
  report.print(out);
  return out.str();
}

bool has_line(const std::string& text, const std::string& what, const std::string& value) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.find(what) != std::string::npos && line.size() >= value.size() &&
        line.compare(line.size() - value.size(), value.size(), value) == 0) {
      return true;
    }
  }
  return false;
}

TEST(ReportTest, OneStepIsNoStepsAndNothingHasNoSign) {
  Report report;
  report.steps = 1;
  report.offloaded_bytes = 1 << 20;
  report.step_peak_bytes = 10;
  const std::string text = printed(report);
  EXPECT_EQ(text.rfind("sidestream: 1 step\n", 0), 0U) << text;
  EXPECT_TRUE(has_line(text, "device memory saved", " 0.0 MiB (0.0% of what was offloaded)")) << text;
}

TEST(ReportTest, TheTableShowsWhatWasCounted) {
  const std::string text = printed(full_report());
  EXPECT_TRUE(has_line(text, "offloaded per step", "8.0 MiB")) << text;
  EXPECT_TRUE(has_line(text, "offloaded by 2 chunks of stage 0", "8.0 MiB (a chunk: 3.0 MiB to 5.0 MiB)")) << text;
  EXPECT_TRUE(has_line(text, "offloaded by 1 chunk of stage 1", "2.0 MiB (a chunk: 2.0 MiB to 2.0 MiB)")) << text;
  EXPECT_TRUE(has_line(text, "reloaded per step", "7.0 MiB")) << text;
  EXPECT_TRUE(has_line(text, "device memory saved", "6.0 MiB (75.0% of what was offloaded)")) << text;
  EXPECT_TRUE(has_line(text, "pinned host memory (requested)", "12.0 MiB (11.0 MiB)")) << text;
  EXPECT_TRUE(has_line(text, "graphs captured (of those, recaptured)", "23 (24)")) << text;
  EXPECT_TRUE(has_line(text, "calls that ran eagerly", "26")) << text;
  EXPECT_TRUE(has_line(text, "outputs reused", "29")) << text;
  EXPECT_TRUE(has_line(text, "outputs still referenced: copied", "30 (9.0 MiB)")) << text;
  EXPECT_TRUE(has_line(text, "gradients still referenced: copied", "32 (15.0 MiB)")) << text;
  EXPECT_TRUE(has_line(text, "outputs without a gradient", "31")) << text;
  EXPECT_TRUE(has_line(text, "copied again after a possible write", "2.0 MiB")) << text;
  EXPECT_TRUE(has_line(text, "saved but not in the plan", "9.0 MiB")) << text;
  EXPECT_TRUE(has_line(text, "not offloaded, no pinned memory", "6.0 MiB")) << text;
  EXPECT_TRUE(has_line(text, "blocks.0", "4.0 MiB of 4.0 MiB")) << text;
  EXPECT_TRUE(has_line(text, "blocks.1",
                       "3.0 MiB of 6.0 MiB  (rest: over the host cap)  (saved by earlier groups too: 1.0 MiB)"))
      << text;
  EXPECT_TRUE(has_line(text, "step 2, on the device", "47.00 ms")) << text;
  EXPECT_TRUE(has_line(text, "step 2, compute waited for copies", "48.00 ms")) << text;
  EXPECT_TRUE(has_line(text, "step 2, copies to the host", "49.00 ms")) << text;
  EXPECT_TRUE(has_line(text, "step 2, copies to the device", "51.00 ms")) << text;
  EXPECT_TRUE(
      has_line(text, "step 2, blocks.0",
               "forward 1.00 ms, backward 2.00 ms, to the host 4.00 ms (53.0 MiB), to the device 5.00 ms (54.0 MiB), "
               "waited 3.00 ms"))
      << text;
  EXPECT_TRUE(has_line(text, "step 2, blocks.1", "forward 6.00 ms")) << text;
  EXPECT_TRUE(has_line(text, "step 2, stage 0, microbatch 0",
                       "to the host 250.00 ms, to the device 500.00 ms, waited 750.00 ms"))
      << text;
  EXPECT_TRUE(has_line(text, "step 2, stage 1, microbatch 0", " -")) << text;
  EXPECT_TRUE(has_line(text, "stays: small", "28 tensors, 3.0 MiB")) << text;
  EXPECT_TRUE(has_line(text, "replays verified (with their gradients)", "29 (30)")) << text;
  EXPECT_TRUE(has_line(text, "findings", "1")) << text;
  EXPECT_TRUE(has_line(text, "not ordered:", "nothing orders a with b")) << text;
  EXPECT_TRUE(has_line(text, "host waits, all steps", "46 (more than 2)")) << text;
  EXPECT_TRUE(has_line(text, "host waits: value read on the host: aten::item, call \"blocks.0\"",
                       ", scope \"blocks.0.mlp\", backward of MulBackward0: 41 times"))
      << text;
  EXPECT_TRUE(has_line(text, "at", "g")) << text;
  EXPECT_TRUE(has_line(text, "host waits: blocking copy: aten::copy_", ", between calls: 3 times")) << text;
  EXPECT_TRUE(has_line(text, "instead:", "pin it")) << text;
  EXPECT_TRUE(has_line(text, "host waits:", "2 times at other places")) << text;
  EXPECT_TRUE(has_line(text, "note:", "a note")) << text;
}

TEST(ReportTest, TheTableLeavesOutWhatDidNotHappen) {
  const std::string text = printed(Report());
  EXPECT_EQ(text.find("copied again"), std::string::npos) << text;
  EXPECT_EQ(text.find("verified"), std::string::npos) << text;
  EXPECT_EQ(text.find("still referenced"), std::string::npos) << text;
  EXPECT_EQ(text.find("without a gradient"), std::string::npos) << text;
  EXPECT_EQ(text.find("findings"), std::string::npos) << text;
  EXPECT_EQ(text.find("not in the plan"), std::string::npos) << text;
  EXPECT_EQ(text.find("no pinned memory"), std::string::npos) << text;
  EXPECT_EQ(text.find("note:"), std::string::npos) << text;
  EXPECT_EQ(text.find("host waits"), std::string::npos) << text;
  EXPECT_EQ(text.find("step 0"), std::string::npos) << text;
}

TEST(ReportTest, ALongNameKeepsItsLineWhole) {
  Report report;
  report.groups = {{std::string(300, 'n'), 2 << 20, 1 << 20, "over the host cap"}};
  EXPECT_TRUE(has_line(printed(report), std::string(300, 'n'), "1.0 MiB of 2.0 MiB  (rest: over the host cap)"));
}

TEST(ReportTest, ControlCharactersInTextsKeepTheirLineWhole) {
  Report report;
  report.groups = {{"a\nb\x1b[31m", 2 << 20, 1 << 20, "over the\nhost cap"}};
  report.order_findings = {"c\nd"};
  report.notes = {"e\rf\x7fg"};
  SyncFinding sync;
  sync.call = "h\ni";
  sync.scope = "j\nk";
  report.syncs = {sync};
  report.syncs_found = 1;
  const std::string text = printed(report);
  EXPECT_TRUE(has_line(text, "  a b [31m ", "1.0 MiB of 2.0 MiB  (rest: over the host cap)")) << text;
  EXPECT_TRUE(has_line(text, "not ordered:", " c d")) << text;
  EXPECT_TRUE(has_line(text, "note:", " e f g")) << text;
  EXPECT_TRUE(has_line(text, "call \"h i\", scope \"j k\"", " times")) << text;
}

TEST(ReportTest, TheJsonHoldsEachFieldByItsName) {
  const auto json = nlohmann::json::parse(full_report().json());
  EXPECT_EQ(json.at("version"), 2);
  EXPECT_EQ(json.at("steps"), 3);
  EXPECT_EQ(json.at("offloaded_bytes"), 8 << 20);
  EXPECT_EQ(json.at("reloaded_bytes"), 7 << 20);
  EXPECT_EQ(json.at("saved_bytes"), 16 << 20);
  EXPECT_EQ(json.at("unseen_bytes"), 1 << 20);
  EXPECT_EQ(json.at("copied_twice_bytes"), 2 << 20);
  EXPECT_EQ(json.at("unplanned_bytes"), 9 << 20);
  EXPECT_EQ(json.at("refused_bytes"), 6 << 20);
  EXPECT_EQ(json.at("pinned_bytes"), 12 << 20);
  EXPECT_EQ(json.at("pinned_requested_bytes"), 11 << 20);
  EXPECT_EQ(json.at("host_cap"), 64 << 20);
  EXPECT_EQ(json.at("waits"), 21);
  EXPECT_EQ(json.at("inline_reloads"), 22);
  EXPECT_EQ(json.at("captures"), 23);
  EXPECT_EQ(json.at("recaptures"), 24);
  EXPECT_EQ(json.at("replays"), 25);
  EXPECT_EQ(json.at("eager_calls"), 26);
  EXPECT_EQ(json.at("outputs_reused"), 29);
  EXPECT_EQ(json.at("outputs_copied"), 30);
  EXPECT_EQ(json.at("outputs_copied_bytes"), 9 << 20);
  EXPECT_EQ(json.at("gradients_copied"), 32);
  EXPECT_EQ(json.at("gradients_copied_bytes"), 15 << 20);
  EXPECT_EQ(json.at("unused_outputs"), 31);
  EXPECT_EQ(json.at("external_bytes"), 5 << 20);
  EXPECT_EQ(json.at("graph_bytes"), 13 << 20);
  EXPECT_EQ(json.at("syncs_found"), 46);
  EXPECT_EQ(json.at("syncs_unlisted"), 2);
  ASSERT_EQ(json.at("syncs").size(), 2U);
  EXPECT_EQ(json.at("syncs")[0].at("kind"), "value read on the host");
  EXPECT_EQ(json.at("syncs")[0].at("operation"), "aten::item");
  EXPECT_EQ(json.at("syncs")[0].at("call"), "blocks.0");
  EXPECT_EQ(json.at("syncs")[0].at("scope"), "blocks.0.mlp");
  EXPECT_EQ(json.at("syncs")[0].at("node"), "MulBackward0");
  EXPECT_EQ(json.at("syncs")[0].at("stack"), (nlohmann::json{"f", "g"}));
  EXPECT_EQ(json.at("syncs")[0].at("count"), 41);
  EXPECT_EQ(json.at("syncs")[0].at("remedy"), "keep it");
  EXPECT_EQ(json.at("warm_up_bytes"), 14 << 20);
  EXPECT_EQ(json.at("sizing_peak_bytes"), 40 << 20);
  EXPECT_EQ(json.at("first_step_peak_bytes"), 36 << 20);
  EXPECT_EQ(json.at("step_peak_bytes"), 34 << 20);
  EXPECT_EQ(json.at("in_flight_bytes"), 2 << 20);
  EXPECT_EQ(json.at("verified_forwards"), 29);
  EXPECT_EQ(json.at("verified_backwards"), 30);
  EXPECT_EQ(json.at("checked_operations"), 27);
  EXPECT_EQ(json.at("r_gross"), 0.75);
  EXPECT_EQ(json.at("r_net"), 1.0);
  EXPECT_EQ(json.at("order_findings").at(0), "nothing orders a with b");
  EXPECT_EQ(json.at("chunks").at(1).at("stage"), 0);
  EXPECT_EQ(json.at("chunks").at(1).at("microbatch"), 1);
  EXPECT_EQ(json.at("chunks").at(1).at("offloaded_bytes"), 5 << 20);
  EXPECT_EQ(json.at("chunks").at(0).at("offload_seconds"), 0.25);
  EXPECT_EQ(json.at("chunks").at(0).at("reload_seconds"), 0.5);
  EXPECT_EQ(json.at("chunks").at(0).at("waited_seconds"), 0.75);
  EXPECT_EQ(json.at("traced_step"), 2);
  EXPECT_EQ(json.at("traced_seconds"), 0.047);
  EXPECT_EQ(json.at("waited_seconds"), 0.048);
  EXPECT_EQ(json.at("offload_seconds"), 0.049);
  EXPECT_EQ(json.at("reload_seconds"), 0.051);
  EXPECT_EQ(json.at("tracing_seconds"), 0.052);
  EXPECT_EQ(json.at("times").at(0), (nlohmann::json{{"name", "blocks.0"},
                                                    {"forward_seconds", 0.001},
                                                    {"backward_seconds", 0.002},
                                                    {"waited_seconds", 0.003},
                                                    {"offload_seconds", 0.004},
                                                    {"reload_seconds", 0.005},
                                                    {"offloaded_bytes", 53 << 20},
                                                    {"reloaded_bytes", 54 << 20}}));
  EXPECT_EQ(json.at("groups").at(1).at("name"), "blocks.1");
  EXPECT_EQ(json.at("groups").at(1).at("shared_bytes"), 1 << 20);
  EXPECT_EQ(json.at("groups").at(1).at("offloaded_bytes"), 3 << 20);
  EXPECT_EQ(json.at("groups").at(1).at("kept_because"), "over the host cap");
  EXPECT_EQ(json.at("exclusions").at(0).at("tensors"), 28);
  EXPECT_EQ(json.at("notes").at(0), "a note");
}

TEST(ReportTest, ANameThatIsNoTextDoesNotStopTheJson) {
  Report report;
  report.groups = {{"block\xff", 1, 0, ""}};
  EXPECT_TRUE(nlohmann::json::accept(report.json()));
}

TEST(ReportTest, NothingOffloadedHasNoRatio) {
  EXPECT_EQ(Report().r_gross(), 0.0);
  EXPECT_EQ(Report().r_net(), 0.0);
}

}  // namespace
}  // namespace sidestream
