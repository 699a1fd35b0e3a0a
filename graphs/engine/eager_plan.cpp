#include "graphs/engine/eager_plan.h"

#include "offload/pinned_plan.h"

namespace sidestream {

void EagerPlan::learn(const Recorder& recorder, const std::vector<std::uint32_t>& needed_immediately) {
  profile_ = recorder.profile();
  scopes_ = recorder.group_scopes();
  identities_ = recorder.identities();
  for (const std::uint32_t group : needed_immediately) {
    profile_.groups[group].needed_immediately = true;
  }
  // An eager group that shares a storage with a call that is captured is held back by it: the call's group is not selected here.
  for (GroupProfile& group : profile_.groups) {
    if (group.captured_later) {
      group.selected = group.needed_immediately = false;
    }
  }
  state_ = State::sized;
}

void EagerPlan::make(HostArena& arena, Exclusions& exclusions, const ProgressCallback& progress) {
  if (state_ != State::sized) {
    return;
  }
  for (std::size_t i = 0; i < identities_.size(); ++i) {
    if (auto alive = identities_[i].storage.lock(); alive && identities_[i].saved.expired()) {
      profile_.storages[i].held_elsewhere = true;
      exclusions.add_held(c10::Storage(std::move(alive)));
    }
  }
  identities_.clear();
  plan_ = plan_and_pin(profile_, arena, HostArena::Surplus::given_back, progress);
  pass_ = lay_out(profile_, scopes_, plan_.decisions.data());
  state_ = State::planned;
}

void EagerPlan::drop() noexcept {
  pass_.clear();
  identities_.clear();
  state_ = State::unsized;
}

}  // namespace sidestream
