#pragma once
#include <memory>
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
/// C is the stream of the capture. D and H are two copy streams of the step's own.
///
///   C   forward g --+------ ... --------+-- allocate g --+------- ... --------+-- backward g -- ... -- end
///                   | fork              ^ offloaded(g)   | fork               ^ reloaded(g)
///   D               +--> copy to host --+                |                    |
///   H                                                    +--> copy to device -+
///
/// The copies that a step needs in its middle are nodes of its graph. A graph that waits for an event from outside waits for the event's
/// latest record before the launch. It cannot wait for a copy that begins while the graph runs.
///
/// The copies are captured as EagerOffload queues them (Note [Eager choreography]). D and H fork from the capture at its begin and join
/// it at its end, so events that are recorded in the capture become edges. The end of the graph waits for the last copy, and so does work
/// that is queued after the step. A step that ends in a backward has reloaded everything by then.
///
/// The graph alone owns its pinned slots: it cuts them from an arena of its own. If a slot had been used outside of the capture, its next
/// use would wait for an event from outside. Inside of the graph the microbatches use the slots one after the other, ordered by edges.
///
/// Each warm-up pass offloads eagerly, the first one included, into slots of the same arena. So a warm-up needs no more device memory
/// than a replay. Its copies are done, and forgotten, before the capture begins.
///
/// Threads: one at a time.
class WholeStepOffload {
 public:
  struct Parts {
    std::shared_ptr<Runtime> runtime;
    std::shared_ptr<HostArena> engine_arena;  ///< whose budget the step's own slots count against
    ScopeTree* tree = nullptr;
    Exclusions* exclusions = nullptr;
    CopyLimits limits;
    std::shared_ptr<CaptureOffload> capture_offload;  ///< notes what the capture's graph owns
  };
  explicit WholeStepOffload(Parts parts) : parts_(std::move(parts)) {}
  WholeStepOffload(const WholeStepOffload&) = delete;
  WholeStepOffload& operator=(const WholeStepOffload&) = delete;
  ~WholeStepOffload();

  /// A warm-up pass begins. The graph of an earlier capture is gone.
  void begin_sizing();
  /// The recorder of one microbatch in a warm-up pass, which is offloaded and counted. Lives until the next microbatch's recorder or the
  /// end.
  [[nodiscard]] SavedTensorRecorder& next_sizing();
  /// It has ended: plans and pins for the capture. Throws: DeviceError.
  void end_sizing();

  /// Inside the capture, on its stream: the copy streams fork from it.
  [[nodiscard]] SavedTensorRecorder& begin_capture();
  /// Inside the capture, after its last backward: the copy streams are joined.
  void end_capture();

  /// An attempt to capture has failed, and nothing of it captures any more. Frees what the attempt held.
  void abandon() noexcept;

  /// Counts of the copies of each replay; zero before a capture.
  [[nodiscard]] const CopyCounts& copies() const noexcept { return counts_; }
  /// Storages that the capture met and the plan did not know.
  [[nodiscard]] const SavedTensorRecorder::Counts& unplanned() const noexcept { return recorded_; }
  /// Of all microbatches, one after the other.
  [[nodiscard]] const Profile& profile() const noexcept { return profile_; }
  [[nodiscard]] const Plan& plan() const noexcept { return plan_; }
  [[nodiscard]] HostArenaStats pinned() const {
    return copies_ != nullptr ? copies_->arena->stats() : HostArenaStats{};
  }

 private:
  /// What the copies of one capture use.
  struct Copies {
    std::shared_ptr<HostArena> arena;
    std::shared_ptr<GroupMover> mover;
    std::shared_ptr<EagerOffload> offload;
    bool captured = false;
  };
  /// The saved tensors of one microbatch of a warm-up pass.
  struct Pass {
    Profile profile;
    std::vector<const ScopeNode*> scopes;
  };

  /// Frees what a pass holds if an exception ended the pass.
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
