#include "graphs/resources/eager_plan.h"

#include <algorithm>
#include <utility>

#include <c10/util/irange.h>

#include "offload/pinned_plan.h"
#include "runtime/replayed_memory.h"

namespace sidestream {
namespace {

/// A plan that leads so many steps did not fail for sizes that differ from step to step.
constexpr std::int64_t kLasting = 32;

}  // namespace

void EagerPlan::learn(const SavedTensorRecorder& recorder, const std::vector<GroupEvent>& order,
                      const CopyLimits& limits) {
  profile_ = recorder.profile();
  scopes_ = recorder.group_scopes();
  identities_ = recorder.identities();
  // An eager group that shares a storage with a call that is captured is held back by it: the call's group is not selected here.
  for (GroupProfile& group : profile_.groups) {
    group.selected = group.selected && !group.captured_later;
  }
  // An output of a call is offloaded with the first eager group that saves it, if its sequence gives the memory back.
  const auto is_eager = [&](std::uint32_t group) { return !profile_.groups[group].captured_later; };
  std::vector<std::uint64_t> selected(profile_.groups.size());
  for (const StorageProfile& storage : profile_.storages) {
    const auto saver = std::find_if(storage.savers.begin(), storage.savers.end(), is_eager);
    if (saver != storage.savers.end()) {
      selected[*saver] += profile_.groups[*saver].selected ? storage.bytes : 0;
    }
  }
  learn_runs(selected);
  std::vector<std::uint64_t> at_once = runs_;
  for (std::size_t group = 0; group < selected.size(); ++group) {
    at_once.push_back(scopes_[group]->delayed ? 0 : selected[group]);
  }
  window_ = limits.for_groups(at_once);
  note_ = limits.note(window_, "the largest eager group");
  const std::vector<bool> turning = needed_immediately_within(order, selected, window_);
  for (std::size_t group = 0; group < turning.size(); ++group) {
    profile_.groups[group].needed_immediately = turning[group] && profile_.groups[group].selected;
  }
  state_ = State::sized;
}

// Only of a sizing step: in a later step replays make no groups between the delayed ones.
void EagerPlan::learn_runs(const std::vector<std::uint64_t>& selected) {
  if (state_ != State::unsized) {
    return;
  }
  runs_.clear();
  bool in_run = false;
  for (std::size_t group = 0; group < selected.size(); ++group) {
    if (profile_.groups[group].captured_later) {
      in_run = false;
    } else if (scopes_[group]->delayed) {
      if (!std::exchange(in_run, true)) {
        runs_.push_back(0);
      }
      runs_.back() += selected[group];
    }
  }
}

bool EagerPlan::offloads_all_savers_of(const c10::StorageImpl* storage) const {
  for (const auto i : c10::irange(identities_.size())) {
    if (identities_[i].storage._unsafe_get_target() != storage) {
      continue;
    }
    for (const std::uint32_t saver : profile_.storages[i].savers) {
      const GroupProfile& group = profile_.groups[saver];
      if (!group.captured_later && (!group.selected || group.needed_immediately)) {
        return false;
      }
    }
  }
  return true;
}

void EagerPlan::captured(const c10::StorageImpl* storage, bool given_back) {
  for (const auto i : c10::irange(identities_.size())) {
    if (identities_[i].storage._unsafe_get_target() != storage) {
      continue;
    }
    // If calls save it, their sequences plan it.
    std::vector<std::uint32_t> savers;
    for (const std::uint32_t saver : profile_.storages[i].savers) {
      if (!profile_.groups[saver].captured_later) {
        savers.push_back(saver);
      }
    }
    if (!savers.empty()) {
      profile_.storages[i].savers = std::move(savers);
      profile_.storages[i].static_output = !given_back;
    }
  }
}

void EagerPlan::make(HostArena& arena, Exclusions& exclusions, const ProgressCallback& progress) {
  steps_ += 1;
  if (state_ != State::sized) {
    return;
  }
  for (std::size_t i = 0; i < identities_.size(); ++i) {
    // A sequence gives out one storage again and again: that it has it holds nothing.
    if (auto alive = identities_[i].storage.lock();
        alive && ReplayedMemory::of(alive->data_ptr()) == nullptr && identities_[i].saved.expired()) {
      profile_.storages[i].held_elsewhere = true;
      exclusions.add_held(c10::Storage(std::move(alive)));
    }
  }
  if (steps_ > kLasting) {
    slots_.clear();
  }
  steps_ = 0;
  plan_ = plan_and_pin(profile_, arena, HostArena::Surplus::given_back, progress, nullptr, &slots_);
  if (!note_.empty()) {
    plan_.notes.push_back(note_);
  }
  pass_ = lay_out(profile_, scopes_, plan_.decisions.data());
  state_ = State::planned;
}

void EagerPlan::drop() noexcept {
  pass_.clear();
  identities_.clear();
  slots_.clear();
  state_ = State::unsized;
}

}  // namespace sidestream
