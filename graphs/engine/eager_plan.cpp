#include "graphs/engine/eager_plan.h"

#include "graphs/engine/call_table.h"
#include "offload/pinned_plan.h"

namespace sidestream {

void EagerPlan::learn(const Recorder& recorder, const SizingMover& sizing, const CallTable& calls) {
  profile_ = recorder.profile();
  scopes_ = recorder.group_scopes();
  for (const std::uint32_t group : sizing.needed_immediately()) {
    profile_.groups[group].needed_immediately = true;
  }
  // An eager group that shares a storage with a graphed call is held back by it: the call's group is not selected here.
  for (GroupProfile& group : profile_.groups) {
    if (calls.in_graphed_call(group.name)) {
      group.selected = group.needed_immediately = false;
    }
  }
  state_ = State::sized;
}

void EagerPlan::make(HostArena& arena, const ProgressCallback& progress) {
  if (state_ != State::sized) {
    return;
  }
  plan_ = plan_and_pin(profile_, arena, progress);
  pass_ = lay_out(profile_, scopes_, plan_.decisions.data());
  state_ = State::planned;
}

void EagerPlan::drop() noexcept {
  pass_.clear();
  state_ = State::unsized;
}

}  // namespace sidestream
