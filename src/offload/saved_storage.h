#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include "memory/host_arena.h"
#include "memory/shared_slots.h"
#include "offload/planned_pass.h"
#include "offload/scope_tree.h"

namespace sidestream {

class EagerOffload;
class StorageMover;
struct Group;

/// Distinct streams; nearly always one.
using Streams = c10::SmallVector<c10::Stream, 2>;
/// Adds `stream`. False if it was there.
inline bool add_stream(Streams& streams, c10::Stream stream) {
  const bool is_new = std::find(streams.begin(), streams.end(), stream) == streams.end();
  if (is_new) {
    streams.push_back(stream);
  }
  return is_new;
}

/// The value of a storage is complete: `ss::mark_ready`.
struct ReadyMark {
  /// Not if a replay has put the bytes of a graph's output elsewhere since.
  [[nodiscard]] bool holds_for(const c10::Storage& storage) const noexcept {
    return event != nullptr && address == storage.data();
  }

  std::shared_ptr<Event> event;
  const void* address = nullptr;
};

/// A storage that autograd saved, wherever its bytes are now. Shared by the handles of all tensors saved from it; it dies with
/// the last of them, and with it the lease and the device copy (so a retained graph keeps both).
struct SavedStorage {
  enum class Place : std::uint8_t { device, offloading, host, reloading };

  SavedStorage(std::shared_ptr<StorageMover> owner, Group* first_saver, c10::Storage storage);
  SavedStorage(const SavedStorage&) = delete;
  SavedStorage& operator=(const SavedStorage&) = delete;
  ~SavedStorage();

  std::shared_ptr<StorageMover> mover;
  std::uint32_t slot = 0;  ///< the mover's own mark: where it keeps track of the storage's copies; 0 for none
  Group* group;            ///< the first saver's; null once the step's bookkeeping is gone
  c10::Storage device;     ///< source, kept or reloaded bytes; null while they are only on the host
  Streams streams;         ///< its memory is kept for them: savers, the first one first, named ones, and readers
  std::size_t bytes;
  HostArena::Lease lease;
  SharedSlots::Parts parts;  ///< of a captured call whose place others have too, in place of `lease`
  ReadyMark ready;           ///< without one its value is complete when its group ends
  Place place = Place::device;
  bool released = false;     ///< the program's own tensor has no memory any more: OffloadScope::release
  bool to_offload = false;   ///< the plan says that it is offloaded when its group ends
  bool for_weights = false;  ///< see StorageProfile
};

/// The tensors that autograd saved inside one scope: they are offloaded and reloaded together.
struct Group {
  const ScopeNode* scope = nullptr;
  std::uint32_t index = 0;                            ///< in the order of first saves
  std::vector<std::weak_ptr<SavedStorage>> storages;  ///< those that this group saved first, also when they are gone
  PlannedPlaces planned;                              ///< the plan's decisions about them
  bool offloads_unplanned = false;  ///< storages without a place in the plan are offloaded too, if there is room
  bool needed_immediately = false;  ///< as planned, or as the last of its scope: backward needs it, so it stays
  bool to_be_captured = false;      ///< saved by a call that runs eagerly once and is captured then
  bool ended = false;
  bool ended_later = false;         ///< by OffloadScope::end_later: its copies wait
  std::uint32_t slot = 0;           ///< the mover's own mark, as a SavedStorage has one; 0 for none
  std::uint64_t refused_bytes = 0;  ///< of storages that were to be offloaded and stayed: no pinned memory was free
  Group* next_tagged = nullptr;     ///< of the same scope, made by a tag
};

/// Empties a group for its next use; what it has allocated stays.
inline void begin_again(Group& group) {
  std::vector<std::weak_ptr<SavedStorage>> storages = std::move(group.storages);
  storages.clear();
  PlannedPlaces planned = std::move(group.planned);
  planned.begin(nullptr);
  group = Group();
  group.storages = std::move(storages);
  group.planned = std::move(planned);
}

/// Where the storages of a captured call are offloaded to.
struct HostPlaces {
  SharedSlots::Share* shared = nullptr;  ///< slots that sequences share; null for slots of the call's own
  /// Storages of an earlier call, whose backward comes before this call's forward. This call takes over their places, one after the other.
  const std::vector<std::shared_ptr<SavedStorage>>* former = nullptr;
  std::size_t next = 0;  ///< of `former`
};

/// What happens to saved storages: nothing (sizing), eager copies, or copies inside a capture.
/// Threads: `group_ended` on the forward's thread; `fetch` and `dropped` on any thread.
class StorageMover {
 public:
  StorageMover() = default;
  StorageMover(const StorageMover&) = delete;
  StorageMover& operator=(const StorageMover&) = delete;
  virtual ~StorageMover() = default;

  /// The group's scope has ended: its storages with `to_offload` set may be offloaded.
  virtual void group_ended(Group& group) = 0;
  /// The storage's bytes on the device, ordered before later work of the current stream.
  [[nodiscard]] virtual c10::Storage fetch(SavedStorage& storage) = 0;
  /// The last handle of `storage` is gone.
  virtual void dropped(SavedStorage& storage) noexcept = 0;
  /// This object, if programs may say when a group is offloaded and reloaded. Null in captures of calls.
  [[nodiscard]] virtual EagerOffload* by_hand() noexcept { return nullptr; }
};

}  // namespace sidestream
