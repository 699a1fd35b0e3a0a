#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "analysis/copy_limits.h"
#include "analysis/group_order.h"
#include "analysis/planner.h"
#include "memory/host_arena.h"
#include "offload/saved_tensor_recorder.h"
#include "sidestream/progress.h"

namespace sidestream {

/// An engine's knowledge of the groups that no graph offloads: first none, then their sizes, then which of them are
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
  /// -> sized: what a pass saw, the sizing pass or a later one that had no room for what it was to offload.
  /// `order`: of its groups. Groups that backward needed within the lag of `limits` stay. Groups of calls that are captured are their
  /// sequences' business.
  void learn(const SavedTensorRecorder& recorder, const std::vector<GroupEvent>& order, const CopyLimits& limits);
  /// False if a group that saved `storage` in that pass stays, and is no captured call's group. If the pass did not save the storage, a
  /// step under the plan saved it.
  [[nodiscard]] bool offloads_all_savers_of(const c10::StorageImpl* storage) const;
  /// Before `make`: from now on a graph makes what lay in `storage` in that pass, at each replay. Where it has `given_back` the memory,
  /// it is offloaded with the eager groups that save it; else it stays.
  void captured(const c10::StorageImpl* storage, bool given_back);
  /// sized -> planned: plans and pins, unless that has been done. Called before each step. Pinned memory that no plan needs is freed,
  /// except the slots of a plan that a few steps have outgrown, because sizes that depend on data recur. If a storage is still alive
  /// after autograd has released it, the program holds it: it stays on the device, and `exclusions` is told.
  /// Capture: illegal.  Throws: errors of `progress`.
  void make(HostArena& arena, Exclusions& exclusions, const ProgressCallback& progress);
  /// planned -> sized: a capture has taken room in the arena.
  void outdate() noexcept { state_ = state_ == State::planned ? State::sized : state_; }
  /// -> unsized. The report still shows the plan before.
  void drop() noexcept;

  /// How far the copies of its groups may be away from compute.
  [[nodiscard]] const CopyWindow& window() const noexcept { return window_; }
  /// The plan's decisions for a step, in the order of its groups.
  [[nodiscard]] const PlannedPass& pass() const noexcept { return pass_; }
  [[nodiscard]] const Profile& profile() const noexcept { return profile_; }
  [[nodiscard]] const Plan& plan() const noexcept { return plan_; }

 private:
  /// Learns the bytes of each run of delayed groups between two calls that graphs take over: a run trails as one group would.
  void learn_runs(const std::vector<std::uint64_t>& selected);

  State state_ = State::unsized;
  Profile profile_;
  std::vector<const ScopeNode*> scopes_;   ///< of the profile's groups
  std::vector<SavedIdentity> identities_;  ///< of the profile's storages
  std::vector<std::uint64_t> runs_;        ///< of delayed groups, in bytes: of the sizing step
  CopyWindow window_;
  std::string note_;                ///< on the window
  std::vector<std::size_t> slots_;  ///< pinned for the plan, the largest first
  std::int64_t steps_ = 0;          ///< that the plan has led
  Plan plan_;
  PlannedPass pass_;
};

}  // namespace sidestream
