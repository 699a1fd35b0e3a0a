#pragma once
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/site.h"
#include "memory/host_arena.h"
#include "offload/saved_storage.h"
#include "offload/sizing.h"
#include "offload/unoffloaded_peak.h"
#include "runtime/runtime.h"

namespace sidestream {

/// Offloads and reloads groups of eager steps: to the host when their scope ends, on a copy stream of its own; back in
/// reverse order, one group ahead, on another.
///
/// Ordering: see Note [Eager choreography] in eager_offload.cpp. Each group has two events of its own.
/// Threads: see StorageMover; one mutex, never held while user code runs.
class EagerOffload final : public StorageMover {
 public:
  struct Counts {
    std::uint64_t offloaded_bytes = 0;
    std::uint64_t reloaded_bytes = 0;
    std::uint64_t waits = 0;           ///< times a stream was made to wait for a copy
    std::uint64_t inline_reloads = 0;  ///< groups that were needed before their reload was begun
    std::uint64_t refused_leases = 0;
  };

  EagerOffload(std::shared_ptr<Runtime> runtime, std::shared_ptr<HostArena> arena, std::size_t groups_in_flight);
  ~EagerOffload() override;

  void begin_step();
  /// A step without a plan. `backward_begins` is called once, when backward asks for the first storage, with the bytes that are away
  /// (see UnoffloadedPeak).
  void begin_sizing_step(std::function<void(std::int64_t away)> backward_begins);
  /// Whose sizing step it was looks no more: a backward that begins after this is not told to it. Gives the step's peaks; null
  /// where there was no sizing step.
  std::unique_ptr<UnoffloadedPeak> end_sizing_step() noexcept;
  /// The current stream, and those that saved in the step, wait for all its copies; all that was held for them is let go.
  void end_step();

  void saved_or_released() override;
  void group_ended(Group& group) override;
  c10::Storage fetch(SavedStorage& storage) override;
  void dropped(SavedStorage& storage) noexcept override;

  [[nodiscard]] Counts counts() const;
  /// Of the latest step: see ImmediateNeeds. Read it after the step.
  [[nodiscard]] const std::vector<std::uint32_t>& needed_immediately() const noexcept { return immediate_.groups(); }

 private:
  /// One offloaded group of this step. Slots are used again from step to step, so that steps make no events.
  struct Slot {
    std::shared_ptr<Event> offloaded;
    std::shared_ptr<Event> reloaded;
    // Of the group's scope, which may be gone: a backward may outlive its engine. Slots are used again, so nothing allocates.
    SiteName site;
    std::vector<std::weak_ptr<SavedStorage>> storages;
    Streams savers;          ///< streams that saved any of them
    Streams arrived;         ///< streams that wait for the H2D already
    bool reloading = false;  ///< the H2D was issued
    bool used = false;       ///< backward has reached it
  };

  /// Those storages of the group that are to leave and get pinned memory.
  [[nodiscard]] std::vector<std::shared_ptr<SavedStorage>> leases_for(Group& group);
  /// In a sizing step: see UnoffloadedPeak.
  void look();
  void let_go_of_oldest();
  /// What the oldest group left from may be used again: its copies are done, or the stream that saved it waits for them.
  void drop_sources();
  void reload(Slot& slot);
  void prefetch_before(std::size_t limit);
  void fork(const OwnedStream& copies, const Streams& savers);
  void await_arrival(Slot& slot, c10::Stream stream);
  /// After a failure: waits on the host until the queued copies are done.
  void settle(const OwnedStream& copies) noexcept;
  Slot& next_slot();
  [[nodiscard]] Slot* slot_of(const SavedStorage& storage);

  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<HostArena> arena_;
  std::size_t groups_in_flight_;
  OwnedStream to_host_;
  OwnedStream to_device_;
  Event fork_;
  mutable std::recursive_mutex mutex_;  ///< recursive: letting go of a storage may drop it
  std::deque<Slot> slots_;
  std::size_t used_slots_ = 0;
  std::deque<std::pair<Slot*, std::vector<std::shared_ptr<SavedStorage>>>>
      stash_;                          ///< sources that a D2H may still read
  std::vector<c10::Storage> dropped_;  ///< reloaded, never used, H2D perhaps in flight
  Streams step_streams_;               ///< those that saved in this step
  ImmediateNeeds immediate_;
  Counts counts_;
  std::function<void(std::int64_t)> backward_begins_;  ///< of a sizing step whose backward has not begun
  std::unique_ptr<UnoffloadedPeak> unoffloaded_;       ///< of a sizing step
  std::unique_ptr<UnoffloadedPeak> ended_;             ///< the same, once its copies have ended
};

}  // namespace sidestream
