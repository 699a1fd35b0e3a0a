#include "tools/cli/rank_reports.h"

#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "sidestream/error.h"
#include "tools/cli/counted.h"

namespace sidestream::cli {
namespace {

using nlohmann::json;

constexpr int kReportVersion = 2;
// So that the sum of a hundred thousand ranks is not too large.
constexpr std::int64_t kMostOfReport = std::int64_t{1} << 46;
constexpr double kMostSeconds = 1e9;

/// A terminal would obey control characters, and a line feed breaks a table.
std::string printable(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char each) { return each < ' ' || each == 0x7f; }, ' ');
  return text;
}

/// Reads the fields of one report, or of an object in one.
class Fields {
 public:
  /// `file` and `what` are for messages: "the report".
  Fields(const json& object, std::string file, std::string what)
      : object_(object), file_(std::move(file)), what_(std::move(what)) {}

  [[nodiscard]] std::int64_t count(const char* name) const {
    const json& value = at(name);
    if (!value.is_number_integer() || value < 0 || value > kMostOfReport) {
      refuse(name, "a number from 0 to 2^46");
    }
    return value.get<std::int64_t>();
  }
  [[nodiscard]] double seconds(const char* name) const {
    const json& value = at(name);
    if (!value.is_number() || value < 0 || value > kMostSeconds) {
      refuse(name, "a number of seconds from 0 to 10^9");
    }
    return value.get<double>();
  }
  [[nodiscard]] std::string text(const char* name) const {
    const json& value = at(name);
    if (!value.is_string()) {
      refuse(name, "a text");
    }
    return printable(value.get<std::string>());
  }
  [[nodiscard]] std::vector<std::string> texts(const char* name) const {
    const json& value = at(name);
    if (!value.is_array() ||
        !std::all_of(value.begin(), value.end(), [](const json& each) { return each.is_string(); })) {
      refuse(name, "a list of texts");
    }
    auto all = value.get<std::vector<std::string>>();
    std::transform(all.begin(), all.end(), all.begin(), printable);
    return all;
  }
  /// Those of each object in a list.
  [[nodiscard]] std::vector<Fields> each(const char* name) const {
    const json& value = at(name);
    if (!value.is_array() ||
        !std::all_of(value.begin(), value.end(), [](const json& each) { return each.is_object(); })) {
      refuse(name, "a list of objects");
    }
    std::vector<Fields> result;
    for (const json& object : value) {
      result.emplace_back(object, file_, fmt::format("an object in \"{}\" of the report", name));
    }
    return result;
  }

 private:
  [[nodiscard]] const json& at(const char* name) const {
    const auto found = object_.find(name);
    if (found == object_.end()) {
      throw UsageError(fmt::format("{}: {} has no \"{}\"; write it with Report::json", file_, what_, name));
    }
    return *found;
  }
  [[noreturn]] void refuse(const char* name, const char* expected) const {
    throw UsageError(
        fmt::format("{}: \"{}\" of {} is not {}; write it with Report::json", file_, name, what_, expected));
  }

  const json& object_;
  std::string file_;
  std::string what_;
};

void require_version(const json& object, const std::string& file) {
  if (object.contains("program")) {
    throw UsageError(file +
                     " was written by the command line program, whose table has all ranks already; give files that "
                     "your trainer wrote with Report::json, one for each rank");
  }
  const auto version = object.find("version");
  if (version == object.end() || *version != kReportVersion) {
    throw UsageError(fmt::format(
        "{} is a report of version {}; this program reads version {}: write it with the same "
        "version of Sidestream",
        file, version != object.end() && version->is_number() ? version->dump() : "unknown", kReportVersion));
  }
}

std::string in_mebibytes(std::int64_t bytes) { return fmt::format("{:.1f}", static_cast<double>(bytes) / (1 << 20)); }

void append_rank_row(std::string& out, std::size_t width, std::string_view name,
                     const std::vector<std::string>& cells) {
  out += fmt::format("  {:<{}}", name, width);
  for (const std::string& cell : cells) {
    out += fmt::format("{:>11}", cell);
  }
  out += '\n';
}

/// R, gross. "-" if nothing was offloaded.
std::string saved_part(std::int64_t saved, std::int64_t offloaded) {
  return offloaded == 0 ? "-"
                        : fmt::format("{:.0f}%", 100 * static_cast<double>(saved) / static_cast<double>(offloaded));
}

std::optional<RankTimes> times_of(const Fields& fields) {
  const RankTimes times{fields.count("traced_step"), fields.seconds("traced_seconds"), fields.seconds("waited_seconds"),
                        fields.seconds("offload_seconds"), fields.seconds("reload_seconds")};
  return times.seconds > 0 ? std::optional(times) : std::nullopt;
}

/// A table of the traced steps, if a rank has one.
void append_times(std::string& out, std::size_t width, const std::vector<RankReport>& ranks) {
  if (std::none_of(ranks.begin(), ranks.end(), [](const RankReport& rank) { return rank.times.has_value(); })) {
    return;
  }
  const auto milliseconds = [](double seconds) { return fmt::format("{:.2f}", 1e3 * seconds); };
  const auto percent = [](double part) { return fmt::format("{:.1f}%", 100 * part); };
  out += "\n  Times on the device in ms, of the step that each rank traced\n\n";
  append_rank_row(out, width, "", {"step", "took", "waited for", "of the", "copies to", "copies to"});
  append_rank_row(out, width, "", {"", "", "copies", "step", "the host", "the device"});
  RankTimes longest;
  double largest_part = 0;
  bool all_timed = true;
  for (const RankReport& rank : ranks) {
    if (!rank.times) {
      append_rank_row(out, width, rank.file, {"-", "-", "-", "-", "-", "-"});
      all_timed = false;
      continue;
    }
    const RankTimes& times = *rank.times;
    const double part = times.waited_seconds / times.seconds;
    append_rank_row(out, width, rank.file,
                    {fmt::format("{}", times.step), milliseconds(times.seconds), milliseconds(times.waited_seconds),
                     percent(part), milliseconds(times.offload_seconds), milliseconds(times.reload_seconds)});
    longest.seconds = std::max(longest.seconds, times.seconds);
    longest.waited_seconds = std::max(longest.waited_seconds, times.waited_seconds);
    longest.offload_seconds = std::max(longest.offload_seconds, times.offload_seconds);
    longest.reload_seconds = std::max(longest.reload_seconds, times.reload_seconds);
    largest_part = std::max(largest_part, part);
  }
  append_rank_row(out, width, "longest",
                  {"", milliseconds(longest.seconds), milliseconds(longest.waited_seconds), percent(largest_part),
                   milliseconds(longest.offload_seconds), milliseconds(longest.reload_seconds)});
  out +=
      "\n  Waited for copies: compute stood still until copies were done. Other copies cost no time.\n"
      "  Longest: of each column.";
  out += all_timed ? "\n" : " -: the rank has timed no step.\n";
}

/// One line for each text, with the ranks that say it.
void append_lines(std::string& out, const std::vector<RankReport>& ranks, std::string_view what,
                  std::vector<std::string> RankReport::*texts) {
  std::map<std::string, std::vector<std::string>> by_text;
  for (const RankReport& rank : ranks) {
    for (const std::string& text : rank.*texts) {
      std::vector<std::string>& of = by_text[text];
      if (of.empty() || of.back() != rank.file) {
        of.push_back(rank.file);
      }
    }
  }
  for (const auto& [text, of] : by_text) {
    out += fmt::format("  {} ({}): {}\n", what, fmt::join(of, ", "), text);
  }
}

void require_like_ranks(const std::vector<RankReport>& ranks) {
  std::set<std::string> files;
  for (const RankReport& rank : ranks) {
    if (rank.steps != ranks.front().steps) {
      throw UsageError(
          fmt::format("{} has {} steps, but {} has {}; give the reports of one run, each written after the "
                      "same step",
                      rank.file, rank.steps, ranks.front().file, ranks.front().steps));
    }
    if (!files.insert(rank.file).second) {
      throw UsageError(rank.file + " is given twice; give each rank's report once");
    }
  }
}

}  // namespace

RankReport parse_rank_report(std::string_view text, const std::string& file) {
  const json object = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!object.is_object()) {
    throw UsageError(file + " is not a whole report; write it with Report::json");
  }
  require_version(object, file);
  const Fields fields(object, file, "the report");
  RankReport report;
  report.file = file;
  report.steps = fields.count("steps");
  report.offloaded_bytes = fields.count("offloaded_bytes");
  report.in_flight_bytes = fields.count("in_flight_bytes");
  report.refused_bytes = fields.count("refused_bytes");
  report.pinned_bytes = fields.count("pinned_bytes");
  report.sizing_peak_bytes = fields.count("sizing_peak_bytes");
  report.step_peak_bytes = fields.count("step_peak_bytes");
  report.waits = fields.count("waits");
  report.inline_reloads = fields.count("inline_reloads");
  report.replays = fields.count("replays");
  report.eager_calls = fields.count("eager_calls");
  report.times = times_of(fields);
  std::map<std::string, std::int64_t> kept;
  for (const Fields& group : fields.each("groups")) {
    const std::int64_t bytes = group.count("bytes") - group.count("offloaded_bytes");
    if (bytes > 0) {
      std::int64_t& all = kept[group.text("kept_because")];
      all = std::min(kMostOfReport, all + bytes);
    }
  }
  report.kept.assign(kept.begin(), kept.end());
  report.order_findings = fields.texts("order_findings");
  report.notes = fields.texts("notes");
  return report;
}

std::string table_of_ranks(const std::vector<RankReport>& ranks) {
  require_like_ranks(ranks);
  RankReport all;
  std::size_t width = std::string_view("longest").size();
  std::map<std::string, std::int64_t> kept;
  std::int64_t saved = 0;
  for (const RankReport& rank : ranks) {
    width = std::max(width, rank.file.size());
    all.offloaded_bytes += rank.offloaded_bytes;
    all.in_flight_bytes += rank.in_flight_bytes;
    all.refused_bytes += rank.refused_bytes;
    all.pinned_bytes += rank.pinned_bytes;
    all.sizing_peak_bytes = std::max(all.sizing_peak_bytes, rank.sizing_peak_bytes);
    all.step_peak_bytes = std::max(all.step_peak_bytes, rank.step_peak_bytes);
    saved += rank.sizing_peak_bytes - rank.step_peak_bytes;
    all.waits += rank.waits;
    all.inline_reloads += rank.inline_reloads;
    all.replays += rank.replays;
    all.eager_calls += rank.eager_calls;
    for (const auto& [reason, bytes] : rank.kept) {
      kept[reason] += bytes;
    }
  }
  const auto cells = [](const RankReport& rank, std::int64_t saved) {
    return std::vector<std::string>{in_mebibytes(rank.offloaded_bytes),      in_mebibytes(rank.pinned_bytes),
                                    in_mebibytes(rank.sizing_peak_bytes),    in_mebibytes(rank.step_peak_bytes),
                                    in_mebibytes(rank.in_flight_bytes),      in_mebibytes(saved),
                                    saved_part(saved, rank.offloaded_bytes), fmt::format("{}", rank.waits),
                                    fmt::format("{}", rank.inline_reloads),  fmt::format("{}", rank.replays),
                                    fmt::format("{}", rank.eager_calls)};
  };
  std::string out = fmt::format("{}, {}. Memory in MiB, of the latest step\n\n",
                                counted(static_cast<std::int64_t>(ranks.size()), "rank"),
                                counted(ranks.empty() ? 0 : ranks.front().steps, "step"));
  append_rank_row(out, width, "",
                  {"offloaded", "pinned", "peak, no", "peak", "in flight", "saved", "of the", "waits for", "late",
                   "graphs", "eager"});
  append_rank_row(out, width, "",
                  {"", "on host", "offload", "", "at peak", "", "offloaded", "copies", "reloads", "launched", "calls"});
  for (const RankReport& rank : ranks) {
    append_rank_row(out, width, rank.file, cells(rank, rank.sizing_peak_bytes - rank.step_peak_bytes));
  }
  append_rank_row(out, width, "all", cells(all, saved));
  out +=
      "\n  All: sums, and the largest peaks. Peak, no offload: of the first step. In flight: offloaded bytes that were "
      "on the "
      "device at the\n  peak. With microbatches not all that a step offloads is on the host at once, so less is saved "
      "than "
      "offloaded. Late reloads had\n  not begun when backward needed them. Eager calls: in all steps. Planned to stay: "
      "in all "
      "captures and eager groups.\n";
  if (all.refused_bytes > 0) {
    out += fmt::format("  stayed, no pinned memory was free: {} MiB\n", in_mebibytes(all.refused_bytes));
  }
  for (const auto& [reason, bytes] : kept) {
    out += fmt::format("  planned to stay, {}: {} MiB\n", reason.empty() ? "no reason given" : reason,
                       in_mebibytes(bytes));
  }
  append_times(out, width, ranks);
  append_lines(out, ranks, "not ordered", &RankReport::order_findings);
  append_lines(out, ranks, "note", &RankReport::notes);
  return out;
}

}  // namespace sidestream::cli
