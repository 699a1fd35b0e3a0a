// The report of one engine.
#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "base/mebibytes.h"
#include "graphs/calls/step_chunks.h"
#include "graphs/capture/whole_step_offload.h"
#include "graphs/engine/engine_state.h"

namespace sidestream {
namespace {

std::string number_of_times(std::int64_t number) { return number == 1 ? "once" : std::to_string(number) + " times"; }

const char* reason(Fate fate) {
  switch (fate) {
    case Fate::offloaded:
      return "";
    case Fate::not_selected:
      return "not selected";
    case Fate::needed_immediately:
      return "backward needs it immediately";
    case Fate::held_back:
      return "another group, which is not offloaded, saved the same storage";
    case Fate::held_elsewhere:
      return "held by the program, or saved by several calls";
    case Fate::marked:
      return "marked with mark_not_offload";
    case Fate::static_output:
      return "it is an output of a graph, and the graph keeps its memory";
    case Fate::over_budget:
      return "over the budget of Options::offload_at_most or offload_fraction";
    case Fate::over_cap:
      return "over the host cap";
    case Fate::not_pinned:
      return "pinned host memory was refused";
  }
  return "";
}

void append(const std::vector<StayingTensors>& staying, std::vector<ExclusionReport>& exclusions) {
  for (const StayingTensors& of_reason : staying) {
    auto found = std::find_if(exclusions.begin(), exclusions.end(),
                              [&](const ExclusionReport& other) { return other.reason == of_reason.reason; });
    if (found == exclusions.end()) {
      exclusions.push_back({of_reason.reason});
      found = std::prev(exclusions.end());
    }
    found->tensors += static_cast<std::int64_t>(of_reason.tensors);
    found->bytes += static_cast<std::int64_t>(of_reason.bytes);
  }
}

void append(const Profile& profile, const Plan& plan, Report& report) {
  const std::size_t first = report.groups.size();
  for (const GroupProfile& group : profile.groups) {
    report.groups.emplace_back().name = group.name.empty() ? "(no scope)" : group.name;
  }
  for (std::size_t i = 0; i < profile.storages.size() && i < plan.decisions.size(); ++i) {
    GroupReport& group = report.groups[first + profile.storages[i].savers.front()];
    const auto bytes = static_cast<std::int64_t>(profile.storages[i].bytes * profile.storages[i].runs);
    if (profile.storages[i].counted_elsewhere) {
      group.shared_bytes += bytes;
      continue;
    }
    group.bytes += bytes;
    for (std::size_t other = 1; other < profile.storages[i].savers.size(); ++other) {
      report.groups[first + profile.storages[i].savers[other]].shared_bytes += bytes;
    }
    if (plan.decisions[i].fate == Fate::offloaded) {
      group.offloaded_bytes += bytes;
    } else if (const std::string why = reason(plan.decisions[i].fate);
               group.kept_because.find(why) == std::string::npos) {
      group.kept_because += (group.kept_because.empty() ? "" : "; ") + why;
    }
  }
  append(profile.staying, report.exclusions);
  report.notes.insert(report.notes.end(), plan.notes.begin(), plan.notes.end());
}

/// Of a whole step's graph.
void append(const WholeStepOffload& offload, Report& report) {
  append(offload.profile(), offload.plan(), report);
  const HostArenaStats pinned = offload.pinned();
  report.pinned_bytes += static_cast<std::int64_t>(pinned.pinned);
  report.pinned_requested_bytes += static_cast<std::int64_t>(pinned.requested);
  report.pinned_allocations_after_planning += static_cast<std::int64_t>(pinned.allocations_after_seal);
  report.unplanned_bytes += static_cast<std::int64_t>(offload.unplanned().unplanned_bytes);
  report.refused_bytes += static_cast<std::int64_t>(offload.unplanned().refused_bytes);
}

/// The calls in a note: how many, and the first one's name.
struct NamedCalls {
  std::string first;
  std::int64_t count = 0;

  void add(const std::string& name) { first = count++ == 0 ? name : first; }
  [[nodiscard]] std::string text() const {
    return "\"" + first + "\"" + (count > 1 ? " and " + std::to_string(count - 1) + " other calls" : "");
  }
};

/// Tells that a bound on captures is too small. A capture that is dropped now and then is what the bound is for; a call that lost more
/// captures than it may have at a time has captured again and again.
void append_dropped(const CallTable& calls, std::int64_t bound, std::vector<std::string>& notes) {
  NamedCalls named;
  std::int64_t dropped = 0;
  for (const CallSite& site : calls.sites()) {
    if (site.variants.dropped > bound) {
      named.add(site.scope->name);
      dropped += site.variants.dropped;
    }
  }
  if (dropped > 0) {
    notes.push_back(
        named.text() + " dropped captures " + std::to_string(dropped) +
        " times to make room for new ones, and CallOptions::max_captures is " + std::to_string(bound) +
        "; each capture takes far longer than a replay: raise max_captures to the number of different shapes "
        "and values, pass fewer of them, or set CallOptions::on_max_captures to eager");
  }
}

/// Tells that memory is not lent along the order of the steps.
void append_order(const StepChunks& chunks, const Options& options, std::vector<std::string>& notes) {
  const auto needed = chunks.too_many_slots();
  if (needed && !options.graph_patterns().empty() && !options.graph_options().retain_graph_in_backward()) {
    notes.push_back("the latest order that a step was given needs " + std::to_string(*needed) +
                    " captures of each call, and CallOptions::max_captures is " +
                    std::to_string(options.call_options().max_captures()) +
                    "; calls are captured as without an order, which takes more memory, and run eagerly if captures of "
                    "earlier orders leave no room: raise max_captures to " +
                    std::to_string(*needed));
  }
}

/// The eager runs of one call.
struct CallRuns {
  const std::string& name;
  const EagerRuns& runs;
  bool captured = true;
};

/// Why calls ran eagerly, one line for each cause. `kind`: "bucketed ", or empty.
void append_eager_runs(const std::string& kind, const std::vector<CallRuns>& calls, std::vector<std::string>& notes) {
  for (std::size_t c = 0; c < EagerRuns::kCauses; ++c) {
    const auto cause = static_cast<EagerCause>(c);
    std::int64_t runs = 0;
    std::int64_t never_captured = 0;
    NamedCalls named;
    for (const CallRuns& call : calls) {
      if (const std::int64_t of_call = call.runs.of(cause); of_call > 0) {
        named.add(call.name);
        runs += of_call;
        never_captured += call.captured ? 0 : 1;
      }
    }
    if (runs > 0) {
      notes.push_back(kind + named.text() + " ran eagerly " + number_of_times(runs) + " " + text_of(cause) +
                      (never_captured > 0 ? "; " + std::to_string(never_captured) + " of them have no capture" : ""));
    }
  }
}

/// Of graphed calls.
void append_graphed(const CallTable& table, std::vector<std::string>& notes) {
  std::vector<CallRuns> calls;
  for (const CallSite& site : table.sites()) {
    calls.push_back({site.scope->name, site.eager_runs, !site.variants.all.empty()});
  }
  append_eager_runs("", calls, notes);
}

/// Of bucketed calls, and bounds on buckets that are too small.
void append_buckets(const EngineCounts& counts, std::vector<std::string>& notes) {
  std::vector<CallRuns> calls;
  for (const auto& [name, buckets] : counts.buckets) {
    calls.push_back({name, buckets.runs});
  }
  append_eager_runs("bucketed ", calls, notes);
  for (const auto& [name, buckets] : counts.buckets) {
    if (buckets.dropped > buckets.bound) {
      notes.push_back(
          "the buckets of \"" + name + "\" were dropped " + std::to_string(buckets.dropped) +
          " times to make room for new ones, and BucketOptions::max_buckets is " + std::to_string(buckets.bound) +
          "; each capture takes far longer than a replay: raise max_buckets to the number of different shapes, "
          "pad inputs to fewer shapes, or set BucketOptions::on_max_buckets to eager");
    }
  }
}

}  // namespace

Report EngineState::report() const {
  Report report = counts_.report;
  const HostArenaStats pinned = resources_.arena->stats();
  report.pinned_bytes = static_cast<std::int64_t>(pinned.pinned);
  report.pinned_requested_bytes = static_cast<std::int64_t>(pinned.requested);
  report.host_cap = static_cast<std::int64_t>(pinned.cap);
  report.pinned_allocations_after_planning = static_cast<std::int64_t>(pinned.allocations_after_seal);
  if (const auto& checked = resources_.check.checked(); checked != nullptr) {
    report.order_findings = checked->findings();
    report.checked_operations = static_cast<std::int64_t>(checked->operations());
  }
  if (resources_.syncs != nullptr) {
    resources_.syncs->add_to(report);
  }
  sequences_.for_each([&](const GraphSequence& sequence) {
    append(sequence.captured().profile, sequence.captured().plan, report);
    report.graph_bytes += sequence.captured().outside.graphs;
    report.warm_up_bytes += sequence.captured().outside.warm_up;
    for (const CapturedCall& call : sequence.captured().calls) {
      for (const c10::Storage& external : call.reads.externals) {
        report.external_bytes += static_cast<std::int64_t>(external.nbytes());
      }
      report.unplanned_bytes += static_cast<std::int64_t>(call.unplanned_bytes);
      report.refused_bytes += static_cast<std::int64_t>(call.refused_bytes);
      if (call.refused_bytes > 0) {
        report.notes.push_back("graphed call \"" + call.spec.name + "\": " + std::to_string(call.refused_bytes) +
                               " bytes stay on the device although the plan offloads them: its capture saved other "
                               "tensors than its sizing pass; let the call do the same work each time");
      }
    }
  });
  for (const auto& weak : resources_.whole_step_offloads) {
    if (const auto offload = weak.lock(); offload != nullptr) {
      append(*offload, report);
    }
  }
  // Groups of calls that were captured since are in their sequences' profiles.
  Report eager;
  append(eager_plan_.profile(), eager_plan_.plan(), eager);
  for (std::size_t i = 0; i < eager.groups.size(); ++i) {
    if (!eager_plan_.profile().groups[i].captured_later) {
      report.groups.push_back(eager.groups[i]);
    }
  }
  append(eager_plan_.profile().staying, report.exclusions);
  report.notes.insert(report.notes.end(), eager.notes.begin(), eager.notes.end());
  if (const std::string switches = resources_.tree.describe_switches(); !switches.empty()) {
    report.notes.push_back("OffloadEngine::set_activation_offloading: " + switches);
  }
  append_graphed(calls_, report.notes);
  append_dropped(calls_, resources_.options.call_options().max_captures(), report.notes);
  append_order(chunks_, resources_.options, report.notes);
  append_buckets(counts_, report.notes);
  if (const std::int64_t small = counts_.small_bytes;
      small > report.saved_bytes && small >= static_cast<std::int64_t>(resources_.options.min_bytes()) &&
      !resources_.options.offload_patterns().empty()) {
    report.notes.push_back(
        "storages below Options::min_bytes, which stay on the device, have more bytes than all others (" +
        mebibytes(counts_.small_bytes) + "): lower min_bytes, or compute experts as one product");
  }
  budget_.add_to(report);
  // A capture forbids to wait for the device.
  if (!making_ready_ && context_.phase() != CallContext::Phase::capturing) {
    add_times(resources_.mover->trace().step(), report);
  }
  if (verification_ != nullptr) {
    verification_->add_to(report);
  }
  return report;
}

}  // namespace sidestream
