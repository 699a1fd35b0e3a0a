#include "sidestream/report.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <map>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "base/mebibytes.h"

namespace sidestream {
namespace {

/// Names and notes may have line feeds, which break the table, and a terminal obeys other control characters.
std::string on_one_line(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char each) { return each < ' ' || each == 0x7f; }, ' ');
  return text;
}

void row(std::ostream& out, std::string what, const std::string& value) {
  constexpr std::size_t width = 44;
  what.resize(std::max(what.size(), width), ' ');
  out << "  " << on_one_line(std::move(what)) << ' ' << on_one_line(value) << '\n';
}

/// A finding in some lines: what, where, how often, the frames, and the remedy once for each kind.
void print_syncs(const Report& report, std::ostream& out) {
  if (report.syncs_found == 0) {
    return;
  }
  row(out, "host waits, all steps (number of places)",
      std::to_string(report.syncs_found) + " (" + (report.syncs_unlisted > 0 ? "more than " : "") +
          std::to_string(report.syncs.size()) + ")");
  constexpr std::size_t kFrames = 6;
  std::set<std::string> advised;
  for (const SyncFinding& sync : report.syncs) {
    out << "  host waits: " << sync.kind << ": " << sync.operation << ", "
        << (sync.call.empty() ? "between calls" : on_one_line("call \"" + sync.call + "\""));
    if (!sync.scope.empty() && sync.scope != sync.call) {
      out << ", scope \"" << on_one_line(sync.scope) << "\"";
    }
    out << (sync.node.empty() ? "" : ", backward of " + sync.node) << ": " << sync.count
        << (sync.count == 1 ? " time\n" : " times\n");
    for (std::size_t i = 0; i < std::min(kFrames, sync.stack.size()); ++i) {
      out << "      at " << sync.stack[i] << '\n';
    }
    if (advised.insert(sync.remedy).second) {
      out << "      instead: " << sync.remedy << '\n';
    }
  }
  if (report.syncs_unlisted > 0) {
    out << "  host waits: " << report.syncs_unlisted << " times at other places\n";
  }
}

/// One row for each virtual stage.
void print_chunks(const Report& report, std::ostream& out) {
  struct Stage {
    std::int64_t chunks = 0;
    std::int64_t bytes = 0;
    std::int64_t least = std::numeric_limits<std::int64_t>::max();
    std::int64_t most = 0;
  };
  std::map<std::int64_t, Stage> stages;
  for (const ChunkReport& chunk : report.chunks) {
    Stage& stage = stages[chunk.stage];
    ++stage.chunks;
    stage.bytes += chunk.offloaded_bytes;
    stage.least = std::min(stage.least, chunk.offloaded_bytes);
    stage.most = std::max(stage.most, chunk.offloaded_bytes);
  }
  for (const auto& [number, stage] : stages) {
    row(out,
        "offloaded by " + std::to_string(stage.chunks) + (stage.chunks == 1 ? " chunk" : " chunks") + " of stage " +
            std::to_string(number),
        mebibytes(stage.bytes) + " (a chunk: " + mebibytes(stage.least) + " to " + mebibytes(stage.most) + ")");
  }
}

void print_forecast(const Report& report, std::ostream& out) {
  if (report.device_budget == 0) {
    return;
  }
  row(out, "budget of device memory", mebibytes(report.device_budget));
  const auto time = [](double seconds) {
    char text[32];
    std::snprintf(text, sizeof text, ", %.1f ms", 1e3 * seconds);
    return std::string(seconds > 0 ? text : "");
  };
  if (report.forecast_peak_bytes > 0) {
    row(out, "forecast for a step within it", mebibytes(report.forecast_peak_bytes) + time(report.forecast_seconds));
  }
  if (report.forecast_step_peak_bytes > 0) {
    row(out, "measured in such a step",
        mebibytes(report.forecast_step_peak_bytes) + time(report.forecast_step_seconds));
  }
}

std::string milliseconds(double seconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f ms", 1e3 * seconds);
  return text;
}

struct Took {
  const char* what;
  double seconds;
  std::string more = "";  ///< to be said of it
};

/// Those that took time; "-" if none did.
std::string in_words(const std::vector<Took>& parts) {
  std::string text;
  for (const Took& part : parts) {
    text += part.seconds > 0 ? (text.empty() ? "" : ", ") + (part.what + milliseconds(part.seconds)) + part.more : "";
  }
  return text.empty() ? "-" : text;
}

/// One row for each call or group, and for each chunk, if the device keeps time.
void print_times(const Report& report, std::ostream& out) {
  if (report.traced_seconds <= 0) {
    return;
  }
  const std::string step = "step " + std::to_string(report.traced_step);
  row(out, step + ", on the device", milliseconds(report.traced_seconds));
  row(out, step + ", compute waited for copies", milliseconds(report.waited_seconds));
  row(out, step + ", copies to the host", milliseconds(report.offload_seconds));
  row(out, step + ", copies to the device", milliseconds(report.reload_seconds));
  const auto copied = [](std::int64_t bytes) { return " (" + mebibytes(bytes) + ")"; };
  for (const TimesReport& times : report.times) {
    row(out, step + ", " + times.name,
        in_words({{"forward ", times.forward_seconds},
                  {"backward ", times.backward_seconds},
                  {"to the host ", times.offload_seconds, copied(times.offloaded_bytes)},
                  {"to the device ", times.reload_seconds, copied(times.reloaded_bytes)},
                  {"waited ", times.waited_seconds}}));
  }
  for (const ChunkReport& chunk : report.chunks) {
    row(out, step + ", stage " + std::to_string(chunk.stage) + ", microbatch " + std::to_string(chunk.microbatch),
        in_words({{"to the host ", chunk.offload_seconds},
                  {"to the device ", chunk.reload_seconds},
                  {"waited ", chunk.waited_seconds}}));
  }
}

double part(std::int64_t bytes, std::int64_t whole) {
  return whole <= 0 ? 0.0 : static_cast<double>(bytes) / static_cast<double>(whole);
}

std::string percent(double part) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f%%", 100 * part);
  return std::string_view(text) == "-0.0%" ? text + 1 : text;
}

}  // namespace

double Report::r_gross() const { return part(sizing_peak_bytes - step_peak_bytes, offloaded_bytes); }

double Report::r_net() const { return part(sizing_peak_bytes - step_peak_bytes, offloaded_bytes - in_flight_bytes); }

void Report::print(std::ostream& out) const {
  out << "sidestream: " << steps << (steps == 1 ? " step\n" : " steps\n");
  row(out, "offloaded per step", mebibytes(offloaded_bytes));
  print_chunks(*this, out);
  row(out, "reloaded per step", mebibytes(reloaded_bytes));
  row(out, "saved by autograd, seen by the engine", mebibytes(saved_bytes));
  row(out, "grew on the device, not seen by the engine", mebibytes(unseen_bytes));
  row(out, "pinned host memory (requested)", mebibytes(pinned_bytes) + " (" + mebibytes(pinned_requested_bytes) + ")");
  row(out, "pinned allocations after planning", std::to_string(pinned_allocations_after_planning));
  row(out, "peak of live memory, no offload", mebibytes(sizing_peak_bytes));
  row(out, "peak of live memory, first step", mebibytes(first_step_peak_bytes));
  row(out, "peak of live memory, latest step", mebibytes(step_peak_bytes));
  if (offloaded_bytes > 0) {
    row(out, "offloaded bytes on the device at that peak", mebibytes(in_flight_bytes));
    row(out, "device memory saved",
        mebibytes(sizing_peak_bytes - step_peak_bytes) + " (" + percent(r_gross()) + " of what was offloaded)");
  }
  print_forecast(*this, out);
  row(out, "waits for copies per step", std::to_string(waits));
  row(out, "reloads not prefetched, per step", std::to_string(inline_reloads));
  row(out, "graphs captured (of those, recaptured)",
      std::to_string(captures) + " (" + std::to_string(recaptures) + ")");
  row(out, "graph launches per step", std::to_string(replays));
  row(out, "calls that ran eagerly, all steps", std::to_string(eager_calls));
  row(out, "outputs reused per step", std::to_string(outputs_reused));
  if (outputs_copied > 0) {
    row(out, "outputs still referenced: copied, per step",
        std::to_string(outputs_copied) + " (" + mebibytes(outputs_copied_bytes) + ")");
  }
  if (gradients_copied > 0) {
    row(out, "gradients still referenced: copied, per step",
        std::to_string(gradients_copied) + " (" + mebibytes(gradients_copied_bytes) + ")");
  }
  if (unused_outputs > 0) {
    row(out, "outputs without a gradient, per step", std::to_string(unused_outputs));
  }
  row(out, "external memory that captures read", mebibytes(external_bytes));
  if (captures > 0) {
    row(out, "memory of graphs, tensors excluded (warm-ups)",
        mebibytes(graph_bytes) + " (" + mebibytes(warm_up_bytes) + ")");
  }
  if (copied_twice_bytes > 0) {
    row(out, "copied again after a possible write", mebibytes(copied_twice_bytes));
  }
  if (unplanned_bytes > 0) {
    row(out, "saved but not in the plan, per step", mebibytes(unplanned_bytes));
  }
  if (refused_bytes > 0) {
    row(out, "not offloaded, no pinned memory, per step", mebibytes(refused_bytes));
  }
  for (const GroupReport& group : groups) {
    row(out, group.name,
        mebibytes(group.offloaded_bytes) + " of " + mebibytes(group.bytes) +
            (group.kept_because.empty() ? "" : "  (rest: " + group.kept_because + ")") +
            (group.shared_bytes > 0 ? "  (saved by earlier groups too: " + mebibytes(group.shared_bytes) + ")" : ""));
  }
  print_times(*this, out);
  for (const ExclusionReport& exclusion : exclusions) {
    row(out, "stays: " + exclusion.reason,
        std::to_string(exclusion.tensors) + " tensors" +
            (exclusion.bytes > 0 ? ", " + mebibytes(exclusion.bytes) : ""));
  }
  if (verified_forwards > 0) {
    row(out, "replays verified (with their gradients)",
        std::to_string(verified_forwards) + " (" + std::to_string(verified_backwards) + ")");
  }
  if (checked_operations > 0) {
    row(out, "operations checked for order", std::to_string(checked_operations));
    row(out, "findings", std::to_string(order_findings.size()));
  }
  for (const std::string& finding : order_findings) {
    out << "  not ordered: " << on_one_line(finding) << "\n";
  }
  print_syncs(*this, out);
  for (const std::string& note : notes) {
    out << "  note: " << on_one_line(note) << "\n";
  }
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(SyncFinding, kind, operation, call, scope, node, stack, count, remedy)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ChunkReport, stage, microbatch, offloaded_bytes, offload_seconds, reload_seconds,
                                   waited_seconds)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(GroupReport, name, bytes, shared_bytes, offloaded_bytes, kept_because)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(TimesReport, name, forward_seconds, backward_seconds, waited_seconds,
                                   offload_seconds, reload_seconds, offloaded_bytes, reloaded_bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ExclusionReport, reason, tensors, bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(
    Report, steps, offloaded_bytes, reloaded_bytes, saved_bytes, unseen_bytes, copied_twice_bytes, unplanned_bytes,
    refused_bytes, pinned_bytes, pinned_requested_bytes, host_cap, pinned_allocations_after_planning, waits,
    inline_reloads, captures, recaptures, replays, eager_calls, outputs_reused, outputs_copied, outputs_copied_bytes,
    gradients_copied, gradients_copied_bytes, unused_outputs, external_bytes, graph_bytes, warm_up_bytes,
    sizing_peak_bytes, first_step_peak_bytes, step_peak_bytes, in_flight_bytes, device_budget, forecast_peak_bytes,
    forecast_step_peak_bytes, forecast_seconds, forecast_step_seconds, traced_step, traced_seconds, waited_seconds,
    offload_seconds, reload_seconds, tracing_seconds, verified_forwards, verified_backwards, checked_operations,
    order_findings, syncs_found, syncs_unlisted, syncs, chunks, groups, times, exclusions, notes)

std::string Report::json() const {
  nlohmann::json object = *this;
  object.update({{"version", 2}, {"r_gross", r_gross()}, {"r_net", r_net()}});
  // A user's name need not be valid text; invalid parts are replaced.
  return object.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace sidestream
