// `sidestream report`: the reports of ranks as one table, and what is refused.
#include "sidestream/report.h"

#include <filesystem>
#include <string>

#include <gtest/gtest.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include "sidestream/error.h"
#include "tests/cli/program.h"
#include "tests/cli/scratch_folder.h"
#include "tests/expect_throws.h"
#include "tools/cli/rank_reports.h"

namespace sidestream::cli {
namespace {

constexpr std::int64_t kMiB = 1 << 20;
constexpr int kRefused = 2;

Report report_of(std::int64_t rank) {
  Report report;
  report.steps = 20;
  report.offloaded_bytes = (10 - 5 * rank) * kMiB;
  report.in_flight_bytes = kMiB;
  report.refused_bytes = rank * kMiB / 2;
  report.pinned_bytes = 12 * kMiB;
  report.sizing_peak_bytes = (40 + rank) * kMiB;
  report.step_peak_bytes = 32 * kMiB;
  report.waits = 7;
  report.inline_reloads = rank;
  report.replays = 48;
  report.groups = {{"blocks.0.mlp", 4 * kMiB, 4 * kMiB, ""}, {"blocks.1.mlp", 4 * kMiB, 0, "not selected"}};
  report.notes = {"the link was not measured"};
  return report;
}

TEST(ReportCommand, RanksAreRowsAndTheirSumsTheLast) {
  const ScratchFolder folder;
  const std::string first = folder.write("rank0.json", report_of(0).json()).string();
  Report other = report_of(1);
  other.order_findings = {"a reads what b writes"};
  const std::string second = folder.write("rank1.json", other.json()).string();
  const ProgramResult result = run_program({"report", first, second});
  EXPECT_EQ(result.code, 0) << result.err;
  const std::string space(first.size(), ' ');
  EXPECT_EQ(result.out,
            "2 ranks, 20 steps. Memory in MiB, of the latest step\n\n"
            "  " +
                space +
                "  offloaded     pinned   peak, no       peak  in flight      saved     of the  waits for       late   "
                "  graphs      eager\n"
                "  " +
                space +
                "               on host    offload               at peak             offloaded     copies    reloads   "
                "launched      calls\n"
                "  " +
                first +
                "       10.0       12.0       40.0       32.0        1.0        8.0        80%          7          0   "
                "      48          0\n"
                "  " +
                second +
                "        5.0       12.0       41.0       32.0        1.0        9.0       180%          7          1   "
                "      48          0\n"
                "  all" +
                space.substr(3) +
                "       15.0       24.0       41.0       32.0        2.0       17.0       113%         14          1   "
                "      96          0\n"
                "\n  All: sums, and the largest peaks. Peak, no offload: of the first step. In flight: offloaded bytes "
                "that were on the device at the\n"
                "  peak. With microbatches not all that a step offloads is on the host at once, so less is saved than "
                "offloaded. Late reloads had\n"
                "  not begun when backward needed them. Eager calls: in all steps. Planned to stay: in all captures "
                "and eager groups.\n"
                "  stayed, no pinned memory was free: 0.5 MiB\n"
                "  planned to stay, not selected: 8.0 MiB\n"
                "  not ordered (" +
                second +
                "): a reads what b writes\n"
                "  note (" +
                first + ", " + second + "): the link was not measured\n");
}

Report timed(Report report, double seconds, double waited) {
  report.traced_step = 3;
  report.traced_seconds = seconds;
  report.waited_seconds = waited;
  report.offload_seconds = seconds / 2;
  report.reload_seconds = seconds / 4;
  return report;
}

TEST(ReportCommand, WaitsAndCopyTimesAreATableOfTheirOwn) {
  const ScratchFolder folder;
  const std::string first = folder.write("rank0.json", timed(report_of(0), 0.1, 0.0125).json()).string();
  Report other = timed(report_of(1), 0.08, 0.02);
  other.traced_step = 4;
  const std::string second = folder.write("rank1.json", other.json()).string();
  Report without = timed(report_of(1), 0, 0);  // as on the simulated device, which keeps no time
  const std::string untimed = folder.write("rank2.json", without.json()).string();
  const std::string space(first.size(), ' ');
  const std::string rows = "  Times on the device in ms, of the step that each rank traced\n\n  " + space +
                           "       step       took waited for     of the  copies to  copies to\n  " + space +
                           "                           copies       step   the host the device\n  " + first +
                           "          3     100.00      12.50      12.5%      50.00      25.00\n  " + second +
                           "          4      80.00      20.00      25.0%      40.00      20.00\n";
  const std::string longest =
      "  longest" + space.substr(7) + "                100.00      20.00      25.0%      50.00      25.00\n";
  const ProgramResult both = run_program({"report", first, second});
  EXPECT_EQ(both.code, 0) << both.err;
  EXPECT_PRED_FORMAT2(testing::IsSubstring, rows + longest, both.out);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "  Longest: of each column.\n", both.out);
  const ProgramResult some = run_program({"report", first, second, untimed});
  EXPECT_PRED_FORMAT2(
      testing::IsSubstring,
      rows + "  " + untimed + "          -          -          -          -          -          -\n" + longest,
      some.out);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "-: the rank has timed no step.\n", some.out);
  const ProgramResult none = run_program({"report", untimed});
  EXPECT_EQ(none.code, 0) << none.err;
  EXPECT_PRED_FORMAT2(testing::IsNotSubstring, "Times on the device", none.out);
}

TEST(ReportCommand, WhatIsNoReportOfAnEngineIsRefused) {
  const ScratchFolder folder;
  const std::string whole = report_of(0).json();
  const auto refused = [&](const std::string& text, const std::string& why) {
    expect_refusal({"report", folder.write("rank.json", text).string()}, kRefused, why);
  };
  refused("", "rank.json is not a whole report");
  refused(whole.substr(0, whole.size() / 2), "rank.json is not a whole report");
  refused("[1]", "is not a whole report");
  refused(R"({"version": 1})", "is a report of version 1; this program reads version 2");
  refused(R"({"steps": 1})", "is a report of version unknown");
  refused(R"({"version": 2, "steps": 1})", "the report has no \"offloaded_bytes\"");
  refused(R"({"program": "sidestream train", "version": "0.2.0"})", "was written by the command line program");
  const auto with = [&](const std::string& field, const std::string& value) {
    nlohmann::json object = nlohmann::json::parse(whole);
    object[field] = nlohmann::json::parse(value);
    return object.dump();
  };
  refused(with("waits", "-1"), "\"waits\" of the report is not a number from 0 to 2^46");
  refused(with("waits", "1e300"), "\"waits\" of the report is not a number");
  refused(with("waits", "18446744073709551615"), "\"waits\" of the report is not a number");
  refused(with("notes", "[1]"), "\"notes\" of the report is not a list of texts");
  refused(with("groups", "[[]]"), "\"groups\" of the report is not a list of objects");
  refused(with("groups", R"([{"bytes": 1}])"), "an object in \"groups\" of the report has no \"offloaded_bytes\"");
  refused("{\"version\": " + std::string(200000, '[') + std::string(200000, ']') + "}",
          "is a report of version unknown");
}

TEST(ReportCommand, ControlCharactersOfAReportAreNotPrinted) {
  const ScratchFolder folder;
  Report report = report_of(0);
  report.notes = {"a\nb\x1b[31m\tc"};
  report.order_findings = {"d\re"};
  report.groups.back().kept_because = "f\x7fg";
  const ProgramResult result = run_program({"report", folder.write("rank.json", report.json()).string()});
  EXPECT_EQ(result.code, 0) << result.err;
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "): a b [31m c\n", result.out);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "): d e\n", result.out);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "planned to stay, f g: ", result.out);
}

TEST(ReportCommand, TimesThatAreNoSecondsAreRefused) {
  const nlohmann::json whole = nlohmann::json::parse(report_of(0).json());
  for (const std::string field : {"traced_seconds", "waited_seconds", "offload_seconds", "reload_seconds"}) {
    for (const nlohmann::json& wrong :
         {nlohmann::json(-0.5), nlohmann::json(1e300), nlohmann::json(), nlohmann::json("1")}) {
      nlohmann::json object = whole;
      object[field] = wrong;
      EXPECT_THROWS(UsageError, "rank.json: \"" + field + "\" of the report is not a number of seconds from 0 to 10^9",
                    (void)parse_rank_report(object.dump(), "rank.json"));
    }
    nlohmann::json without = whole;
    without.erase(field);
    EXPECT_THROWS(UsageError, "the report has no \"" + field + '"',
                  (void)parse_rank_report(without.dump(), "rank.json"));
  }
  nlohmann::json object = whole;
  object["traced_step"] = -1;
  EXPECT_THROWS(UsageError, "\"traced_step\" of the report is not a number from 0 to 2^46",
                (void)parse_rank_report(object.dump(), "rank.json"));
}

TEST(ReportCommand, FilesThatCannotBeReadAndRanksThatDoNotMatchAreRefused) {
  const ScratchFolder folder;
  const std::string rank = folder.write("rank0.json", report_of(0).json()).string();
  expect_refusal({"report"}, kRefused, "FILE");
  expect_refusal({"report", "nowhere.json"}, kRefused, "cannot read nowhere.json: No such file");
  expect_refusal({"report", folder.path().string()}, kRefused, "Is a directory");
  expect_refusal({"report", rank, rank}, kRefused, "rank0.json is given twice");
  const std::string again = (folder.path() / "." / "rank0.json").string();
  expect_refusal({"report", rank, again}, kRefused, "are the same file; give each rank's report once");
  const std::string link = (folder.path() / "link.json").string();
  std::filesystem::create_symlink(rank, link);
  expect_refusal({"report", rank, link}, kRefused, "are the same file; give each rank's report once");
  const std::string second_name = (folder.path() / "hard.json").string();
  ASSERT_EQ(::link(rank.c_str(), second_name.c_str()), 0);
  expect_refusal({"report", rank, second_name}, kRefused, "are the same file; give each rank's report once");
  Report later = report_of(1);
  later.steps = 21;
  expect_refusal({"report", rank, folder.write("rank1.json", later.json()).string()}, kRefused,
                 "rank1.json has 21 steps, but");
}

}  // namespace
}  // namespace sidestream::cli
