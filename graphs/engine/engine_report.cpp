#include "graphs/engine/engine_state.h"

namespace sidestream {
namespace {

const char* reason(Fate fate) {
  switch (fate) {
    case Fate::offloaded:
      return "";
    case Fate::not_selected:
      return "not selected";
    case Fate::needed_immediately:
      return "backward needs it immediately";
    case Fate::held_back:
      return "held back by another saver";
    case Fate::over_cap:
      return "over the host cap";
    case Fate::not_pinned:
      return "pinned host memory was refused";
  }
  return "";
}

void append(const Profile& profile, const Plan& plan, Report& report) {
  const std::size_t first = report.groups.size();
  for (const GroupProfile& group : profile.groups) {
    report.groups.push_back({group.name.empty() ? "(no scope)" : group.name, 0, 0, ""});
  }
  for (std::size_t i = 0; i < profile.storages.size() && i < plan.decisions.size(); ++i) {
    GroupReport& group = report.groups[first + profile.storages[i].savers.front()];
    const auto bytes = static_cast<std::int64_t>(profile.storages[i].bytes);
    group.bytes += bytes;
    if (plan.decisions[i].fate == Fate::offloaded) {
      group.offloaded_bytes += bytes;
    } else if (group.kept_because.empty()) {
      group.kept_because = reason(plan.decisions[i].fate);
    }
  }
  report.notes.insert(report.notes.end(), plan.notes.begin(), plan.notes.end());
}

}  // namespace

Report EngineState::report() const {
  Report report = step_;
  const HostArenaStats pinned = arena_->stats();
  report.pinned_bytes = static_cast<std::int64_t>(pinned.pinned);
  report.pinned_requested_bytes = static_cast<std::int64_t>(pinned.requested);
  report.host_cap = static_cast<std::int64_t>(pinned.cap);
  report.pinned_allocations_after_planning = static_cast<std::int64_t>(pinned.allocations_after_seal);
  if (checked_ != nullptr) {
    report.order_findings = checked_->findings();
    report.checked_operations = static_cast<std::int64_t>(checked_->operations());
  }
  for (const auto& weak : chains_) {
    if (const auto holder = weak.lock(); holder != nullptr && holder->chain != nullptr) {
      append(holder->chain->profile(), holder->chain->plan(), report);
      for (const Layer& layer : holder->chain->layers()) {
        for (const c10::Storage& external : layer.externals) {
          report.external_bytes += static_cast<std::int64_t>(external.nbytes());
        }
      }
    }
  }
  // Groups that graphed calls save are in their chains' profiles.
  Report eager;
  append(eager_profile_, eager_plan_, eager);
  for (std::size_t g = 0; g < eager.groups.size(); ++g) {
    if (!in_graphed_call(eager_profile_.groups[g].name)) {
      report.groups.push_back(eager.groups[g]);
    }
  }
  report.notes.insert(report.notes.end(), eager.notes.begin(), eager.notes.end());
  const auto tallies = exclusions_.tallies();
  for (std::size_t i = 1; i < tallies.size(); ++i) {
    if (tallies[i].tensors > 0) {
      report.exclusions.push_back({exclusion_name(static_cast<Exclusion>(i)),
                                   static_cast<std::int64_t>(tallies[i].tensors),
                                   static_cast<std::int64_t>(tallies[i].bytes)});
    }
  }
  return report;
}

}  // namespace sidestream
