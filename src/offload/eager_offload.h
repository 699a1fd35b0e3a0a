#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "analysis/copy_limits.h"
#include "analysis/group_order.h"
#include "base/site.h"
#include "offload/group_mover.h"
#include "offload/saved_storage.h"
#include "offload/sizing_peak.h"
#include "offload/step_order.h"
#include "runtime/live_memory.h"
#include "runtime/runtime.h"

namespace sidestream {

/// Offloads and reloads groups of eager steps. A group is offloaded when its scope ends. If the step takes the same order as the step
/// before, a group is reloaded as early as lag and lookahead allow; otherwise groups are reloaded in reverse order, one group ahead.
///
/// eager_offload.cpp and eager_lag.cpp hold the window and trailing groups, eager_delay.cpp delayed groups, eager_reload.cpp reloads,
/// eager_by_hand.cpp what programs ask for.
/// Ordering: see Note [Eager choreography] in eager_offload.cpp. Each group has two events of its own.
/// Threads: see StorageMover; one mutex, never held while user code runs.
class EagerOffload : public StorageMover {
 public:
  EagerOffload(std::shared_ptr<Runtime> runtime, std::shared_ptr<GroupMover> mover, CopyLimits limits);
  ~EagerOffload() override;

  [[nodiscard]] const CopyLimits& limits() const noexcept { return limits_; }
  /// From the next step on. Until then, and from the next sizing step on: that of the largest groups so far.
  void set_window(const CopyWindow& window);

  void begin_step();
  /// After it: the step runs its chunks in `order`; null if it was given none.
  void expect_order(const std::vector<PipelineStep>* order);
  /// Groups that end from here on belong to that chunk. Threads: the forward's.
  void in_chunk(const GroupChunk& chunk) noexcept { order_.in_chunk(chunk); }
  /// A step without a plan. `backward_begins` is called once, when backward asks for the first storage, with the bytes that are away
  /// (see SizingPeak).
  void begin_sizing_step(std::function<void(std::int64_t away)> backward_begins);
  /// Returns the peaks of the sizing step, or null if there was none. `backward_begins` is not called any more.
  std::unique_ptr<SizingPeak> end_sizing_step() noexcept;
  /// The current stream, and those that saved in the step, wait for all its copies; everything that was held for them is freed.
  void end_step();
  /// The step was left before its end. The host waits for its copies, and everything that was held for them is freed. This object and the
  /// storages whose copies are running own each other: end or abandon each step, or both leak.
  void abandon_step() noexcept;

  /// A graph of the engine was launched, and the current stream does not wait for it yet: the groups that were delayed until now
  /// are offloaded beside it. If there are none, it costs one load.
  void graph_launched() {
    if (any_delayed_.load(std::memory_order_relaxed)) {
      send_delayed();
    }
  }
  /// The groups that were delayed until now are offloaded, the oldest first.
  void send_delayed();

  // A program's own word about a group of this step, which has ended.
  /// If it is delayed, it is offloaded now.
  void start_offload(const Group& group);
  /// If it is offloaded, the stream that saved it waits for its copies, and its sources are freed.
  void finish_offload(const Group& group);
  /// If its sources were freed, it is reloaded now. If it is delayed, it stays where it is.
  void start_reload(const Group& group);
  /// Takes the memory of `storage` out of it and gives it to `holders`, which have it on the device, alone. Reads of `storage` throw
  /// `message`. Returns the memory.
  virtual c10::Storage release(const c10::Storage& storage, const std::vector<std::shared_ptr<SavedStorage>>& holders,
                               const std::string& message);
  /// A mark of what the current stream holds now, for the bytes where `storage` has them. Its event is used again in the next step.
  [[nodiscard]] ReadyMark mark_ready(const c10::Storage& storage);

  void group_ended(Group& group) override;
  c10::Storage fetch(SavedStorage& storage) override;
  void dropped(SavedStorage& storage) noexcept override;
  [[nodiscard]] EagerOffload* by_hand() noexcept override { return this; }

  /// What happened in the latest step, to which group by its index. Read it after the step.
  [[nodiscard]] std::vector<GroupEvent> events() const;

 protected:
  /// Memory that a storage is reloaded to, of the current stream.
  [[nodiscard]] virtual c10::Storage allocate(std::size_t bytes);

 private:
  /// One group of this step that the options name. Slots are used again from step to step, so that steps make no events.
  struct Slot {
    enum class State : std::uint8_t {
      here,        ///< nothing of it was offloaded
      delayed,     ///< its D2H is issued after the next graph
      offloading,  ///< its D2H was issued
      away,        ///< its sources were freed
      reloaded     ///< its H2D was issued
    };
    std::shared_ptr<Event> offloaded;  ///< null until it is offloaded, as `reloaded`
    std::shared_ptr<Event> reloaded;
    // Of the group's scope, which may be gone: a backward may outlive its engine. Slots are used again, so nothing allocates.
    SiteName site;
    std::vector<std::weak_ptr<SavedStorage>> storages;
    /// That a D2H may still read, while it trails.
    std::vector<std::shared_ptr<SavedStorage>> sources;
    Streams savers;           ///< streams that saved any of what was offloaded
    Streams arrived;          ///< streams that wait for the H2D already
    std::uint32_t group = 0;  ///< its index
    std::uint64_t chunk = 0;  ///< see StepTrace
    State state = State::here;
    bool used = false;           ///< backward has reached it
    std::int64_t in_flight = 0;  ///< bytes of it that are on the device, on their way

    /// What was to be offloaded stays on the device after all.
    void keep_sources() noexcept {
      for (const auto& saved : sources) {
        saved->lease.reset();
        saved->to_offload = false;
      }
      sources.clear();
    }
    [[nodiscard]] bool is_gone() const noexcept {
      return std::all_of(storages.begin(), storages.end(), [](const auto& saved) { return saved.expired(); });
    }
  };
  /// A group that ended and whose sources are not freed.
  struct Trailing {
    Slot* slot;
    std::uint64_t bytes;
  };

  /// In a sizing step: see SizingPeak.
  void look();
  /// In a step that is traced: memory is counted anew from here on.
  void trace_memory();
  /// So many bytes of that group are on the device, on their way: see LiveMemory.
  void set_in_flight(Slot& slot, std::int64_t bytes);
  /// Queues the copies of its sources.
  void send(Slot& slot);
  /// True for a group whose copies out wait for the next graph.
  [[nodiscard]] bool is_delayed(const Group& group, const Slot& slot) const;
  void delay(Slot& slot);
  /// It is offloaded now, whatever was launched.
  void send_delayed(Slot& slot);
  /// Backward needs it before it was offloaded: it stays where it is.
  void keep_delayed(Slot& slot) noexcept;
  void trail(Slot& slot, std::uint64_t bytes);
  void free_oldest();
  /// Frees what the group of `slot` was offloaded from, whatever the lag.
  void free_sources_of(const Slot& slot);
  /// Does so for groups that backward used while their copies trailed, and that it no longer needs.
  void free_used_sources();
  /// That storage is on the host alone from here on.
  void free_on_device(const std::shared_ptr<SavedStorage>& saved);
  /// The oldest group's sources may be used again: its copies are done, or the stream that saved it waits for them.
  void drop_sources();
  void reload(Slot& slot);
  /// Backward reaches that slot.
  void use(std::size_t number);
  /// Reloads what the order of steps says is due now.
  void reload_due();
  /// Without it: one group ahead.
  void prefetch_before(std::size_t limit);
  void await_arrival(Slot& slot, c10::Stream stream);
  Slot& next_slot();
  /// The latest slot is of no group: its storages stay on the device.
  void give_up(Slot& slot);
  /// The slot with this mark. Null if there is none.
  [[nodiscard]] Slot* slot_of(std::uint32_t mark);

  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<GroupMover> mover_;
  LiveMemory& live_;
  CopyLimits limits_;
  std::optional<CopyWindow> planned_window_;
  std::vector<std::uint64_t> largest_ = {0, 0};  ///< groups so far, if no window is planned
  CopyWindow window_;
  mutable std::recursive_mutex mutex_;  ///< recursive: letting go of a storage may drop it
  std::deque<Slot> slots_;
  std::size_t used_slots_ = 0;
  std::size_t first_slot_ = 0;      ///< of this step
  std::vector<Trailing> trailing_;  ///< the oldest first
  std::uint64_t trailing_bytes_ = 0;
  std::vector<std::shared_ptr<Event>> ready_;  ///< events of mark_ready
  std::size_t used_ready_ = 0;                 ///< in this step
  std::vector<Slot*> delayed_;                 ///< the oldest first
  std::atomic<bool> any_delayed_ = false;
  /// The reload that is being queued.
  std::vector<std::shared_ptr<SavedStorage>> reloading_;
  std::vector<c10::Storage> dropped_;  ///< reloaded, never used, H2D perhaps in flight
  Streams step_streams_;               ///< those that saved in this step
  bool copied_ = false;                ///< copies were issued that no step's end has waited for
  StepOrder order_;
  std::function<void(std::int64_t)> backward_begins_;  ///< of a sizing step whose backward has not begun
  std::unique_ptr<SizingPeak> sizing_;                 ///< null in other steps
};

}  // namespace sidestream
