#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "memory/host_arena.h"
#include "offload/capture_offload.h"
#include "offload/eager_offload.h"
#include "offload/exclusions.h"
#include "offload/group_mover.h"
#include "offload/recorder.h"
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
/// Threads: one at a time.
class StepOffload {
 public:
  struct Parts {
    std::shared_ptr<Runtime> runtime;
    std::shared_ptr<HostArena> engine_arena;  ///< whose cap the step's own slots count against
    ScopeTree* tree = nullptr;
    Exclusions* exclusions = nullptr;
    EagerOffload::Limits limits;
    std::shared_ptr<CaptureOffload> capture_offload;               ///< who notes what the capture's graph owns
    std::vector<std::weak_ptr<HostArena>>* step_arenas = nullptr;  ///< who is told of the step's own, for the report
  };
  explicit StepOffload(Parts parts) : parts_(std::move(parts)) {}

  /// A warm-up pass begins: nothing leaves, all is counted.
  void begin_sizing();
  /// The recorder of one microbatch's forward in a warm-up pass; it lives until the next one's, or the end.
  [[nodiscard]] Recorder& next_sizing();
  /// It has ended: pins what the capture needs. Throws: DeviceError.
  void end_sizing();

  /// Inside the capture, on its stream: the copy streams fork from it.
  [[nodiscard]] Recorder& begin_capture();
  /// Inside the capture, behind its last backward: the copy streams are joined.
  void end_capture();
  /// What leaves in each replay. Bytes.
  [[nodiscard]] std::uint64_t offloaded_bytes() const noexcept { return offloaded_bytes_; }

 private:
  /// What one capture's copies go through.
  struct Copies {
    std::vector<std::size_t> sizes;
    std::shared_ptr<HostArena> arena;
    std::shared_ptr<GroupMover> mover;
    std::shared_ptr<EagerOffload> offload;
    bool captured = false;
  };

  Parts parts_;
  std::unique_ptr<Recorder> recorder_;
  std::vector<std::size_t> sizes_;  ///< of the microbatch that saves the most
  std::size_t sizes_sum_ = 0;
  std::vector<Copies> copies_;  ///< the last is for the next capture; one before it may be of graphs that live
  std::uint64_t offloaded_bytes_ = 0;
};

}  // namespace sidestream
