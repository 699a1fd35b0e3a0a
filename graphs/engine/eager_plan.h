#pragma once
#include <cstdint>
#include <vector>

#include "analysis/planner.h"
#include "memory/host_arena.h"
#include "offload/recorder.h"
#include "offload/sizing.h"
#include "sidestream/progress.h"

namespace sidestream {

class CallTable;

/// What an engine knows of the groups that no graph offloads: first nothing, then their sizes, then which of them are
/// offloaded.
/// Threads: the step's.
class EagerPlan {
 public:
  enum class State : std::uint8_t {
    unsized,  ///< the next step is a sizing pass
    sized,    ///< to be planned before the next step
    planned,
  };

  [[nodiscard]] State state() const noexcept { return state_; }
  /// unsized -> sized: what the sizing pass saw. Groups of graphed calls are their chains' business.
  void learn(const Recorder& recorder, const SizingMover& sizing, const CallTable& calls);
  /// sized -> planned: plans and pins, where that has not been done. Capture: illegal.  Throws: what `progress` throws.
  void make(HostArena& arena, const ProgressCallback& progress);
  /// planned -> sized: a capture has taken room in the arena.
  void outdate() noexcept { state_ = state_ == State::planned ? State::sized : state_; }
  /// -> unsized. The report still tells of the plan before.
  void drop() noexcept;

  /// What the plan says of a step, in the order of its groups.
  [[nodiscard]] const PlannedPass& pass() const noexcept { return pass_; }
  [[nodiscard]] const Profile& profile() const noexcept { return profile_; }
  [[nodiscard]] const Plan& plan() const noexcept { return plan_; }

 private:
  State state_ = State::unsized;
  Profile profile_;
  std::vector<const ScopeNode*> scopes_;  ///< of the profile's groups
  Plan plan_;
  PlannedPass pass_;
};

}  // namespace sidestream
