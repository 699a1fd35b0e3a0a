#pragma once
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include "runtime/live_memory.h"
#include "runtime/runtime.h"

namespace sidestream {

struct SavedStorage;

/// The peak of device memory that a pass would have had without offload: the maximum, over all moments, of live bytes plus *away* bytes.
/// Bytes are away if autograd still needs them and no memory of the device holds them.
///
/// If the program itself holds a storage, its bytes become away when the program releases it. The next look sees that, so looks must be
/// frequent: when autograd saves a tensor, asks for one, or no longer needs it. If a storage is freed between two looks, it counts as
/// freed at the later one.
/// Threads: one at a time.
class UnoffloadedPeak {
 public:
  /// The pass begins. `runtime` must outlive this object. Throws: as Runtime::memory_stats, as all of its functions.
  explicit UnoffloadedPeak(Runtime& runtime);
  UnoffloadedPeak(const UnoffloadedPeak&) = delete;
  UnoffloadedPeak& operator=(const UnoffloadedPeak&) = delete;
  ~UnoffloadedPeak();

  /// The bytes of `saved` are on the host, and its mover is about to free those on the device.
  void lets_go(const SavedStorage& saved);
  /// Memory that was allocated from the latest `return_begins` to here is a block, which would not exist without offload: see SmallBlock.
  /// The block's members are freed after this call.
  void gathered(const SavedStorage& block);
  /// `only_copies`: bytes on the device, now, that only copies still need, which may be running.
  void look(std::int64_t only_copies);
  /// Memory that is allocated from here to `came_back` is for bytes that are reloaded, from here to `gathered` for a block.
  void return_begins() { change(0); }
  void came_back(const SavedStorage& saved);
  /// Autograd needs `saved` no more.
  void dropped(const SavedStorage& saved);

  [[nodiscard]] std::int64_t away() const noexcept { return away_; }
  /// Up to now: what the device really had, and what it would have had.
  [[nodiscard]] LiveMemory::Peak peaks() { return measurement_.peak(); }

 private:
  struct Source {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    std::int64_t bytes = 0;
    bool gone = false;
    bool back = false;  ///< in other memory
  };
  void change(std::int64_t by);

  Runtime* runtime_;
  LiveMemory& memory_;
  LiveMemory::Measurement measurement_;
  std::unordered_map<const SavedStorage*, Source> sources_;
  std::vector<const SavedStorage*> held_;  ///< those whose source is not gone
  std::int64_t away_ = 0;                  ///< less what is there twice or as a block, and what only copies need
  std::int64_t only_copies_ = 0;           ///< at the latest look
};

}  // namespace sidestream
