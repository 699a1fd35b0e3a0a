#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "analysis/planner.h"
#include "memory/host_arena.h"
#include "offload/capture_offload.h"
#include "offload/eager_offload.h"
#include "offload/exclusions.h"
#include "offload/group_mover.h"
#include "offload/planned_pass.h"
#include "offload/saved_tensor_recorder.h"
#include "offload/scope_tree.h"
#include "runtime/runtime.h"

namespace sidestream {

/// Offload inside of one graph that holds forward and backward: the copies of its groups are branches of the graph.
///
/// Note [Copies inside of a step's graph]
/// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
/// A wait of a graph for an event from outside is one for the latest record before its launch: it cannot bind to a copy that begins
/// while the graph runs. So copies that a step needs in its middle are nodes of it. They are captured as EagerOffload queues them
/// (Note [Eager choreography]), on two copy streams of the step's own that fork from the capture at its begin and are joined at its
/// end: events that are recorded in the capture become edges. What that costs: the graph's end, and so whatever is queued behind the
/// step, waits for the last copy; a step that ends in a backward has brought everything back by then.
///
/// Pinned slots are the graph's own, cut from an arena that nobody else leases of: a slot whose last use was outside of the capture would
/// be a wait for an event from outside. Slots are used again inside of the graph, microbatch after microbatch, behind edges.
///
/// A warm-up pass offloads eagerly, from the first one on, into slots of the same arena: it needs no more of the device than a replay.
/// Its copies are done, and forgotten, before the capture begins.
/// Threads: one at a time.
class WholeStepOffload {
 public:
  struct Parts {
    std::shared_ptr<Runtime> runtime;
    std::shared_ptr<HostArena> engine_arena;  ///< whose budget the step's own slots count against
    ScopeTree* tree = nullptr;
    Exclusions* exclusions = nullptr;
    EagerOffload::Limits limits;
    std::shared_ptr<CaptureOffload> capture_offload;  ///< who notes what the capture's graph owns
  };
  explicit WholeStepOffload(Parts parts) : parts_(std::move(parts)) {}
  WholeStepOffload(const WholeStepOffload&) = delete;
  WholeStepOffload& operator=(const WholeStepOffload&) = delete;
  ~WholeStepOffload();

  /// A warm-up pass begins. The graph of an earlier capture is gone.
  void begin_sizing();
  /// The recorder of one microbatch in a warm-up pass, which leaves and is counted; it lives until the next one's, or the end.
  [[nodiscard]] SavedTensorRecorder& next_sizing();
  /// It has ended: plans and pins for the capture. Throws: DeviceError.
  void end_sizing();

  /// Inside the capture, on its stream: the copy streams fork from it.
  [[nodiscard]] SavedTensorRecorder& begin_capture();
  /// Inside the capture, behind its last backward: the copy streams are joined.
  void end_capture();

  /// An attempt to capture has failed, and nothing of it captures any more: what it held goes.
  void abandon() noexcept;

  /// What each replay copies; nothing before a capture.
  [[nodiscard]] const CopyCounts& copies() const noexcept { return counts_; }
  /// What the capture met that the plan did not know.
  [[nodiscard]] const SavedTensorRecorder::Counts& unplanned() const noexcept { return recorded_; }
  /// Of all microbatches, one behind the other.
  [[nodiscard]] const Profile& profile() const noexcept { return profile_; }
  [[nodiscard]] const Plan& plan() const noexcept { return plan_; }
  [[nodiscard]] HostArenaStats pinned() const {
    return copies_ != nullptr ? copies_->arena->stats() : HostArenaStats{};
  }

 private:
  /// What one capture's copies go through.
  struct Copies {
    std::shared_ptr<HostArena> arena;
    std::shared_ptr<GroupMover> mover;
    std::shared_ptr<EagerOffload> offload;
    bool captured = false;
  };
  /// What one microbatch of a warm-up pass saved.
  struct Pass {
    Profile profile;
    std::vector<const ScopeNode*> scopes;
  };

  /// Lets go of what a pass holds that something ended in its middle.
  void leave_passes() noexcept;
  void finish_sizing();
  void add_to_plan(const Pass& pass, const Plan& plan);

  Parts parts_;
  std::unique_ptr<SavedTensorRecorder> recorder_;
  std::unique_ptr<Copies> copies_;      ///< of the latest capture, or for the next
  std::shared_ptr<EagerOffload> warm_;  ///< of a warm-up pass
  std::vector<Pass> passes_;            ///< of the latest
  Profile profile_;
  Plan plan_;
  PlannedPass planned_;
  CopyCounts counts_;
  SavedTensorRecorder::Counts recorded_;
};

}  // namespace sidestream
