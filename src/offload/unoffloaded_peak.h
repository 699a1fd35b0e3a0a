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

/// The peak of device memory that a pass would have had if nothing had been offloaded: the most, over all moments, of what is live and what is
/// away. Bytes are away while autograd still needs them and nobody has them on the device.
///
/// What the program itself holds becomes away when it lets go; that is seen at the next look, so looks are to be frequent: where
/// autograd saves a tensor, asks for one, or needs it no more. What dies between two looks counts from the later one.
/// Threads: one at a time.
class UnoffloadedPeak {
 public:
  /// The pass begins. `runtime` must outlive this object. Throws: as Runtime::memory_stats, as all of its functions.
  explicit UnoffloadedPeak(Runtime& runtime);
  UnoffloadedPeak(const UnoffloadedPeak&) = delete;
  UnoffloadedPeak& operator=(const UnoffloadedPeak&) = delete;
  ~UnoffloadedPeak();

  /// The bytes of `saved` are on the host, and its mover is about to let go of those on the device.
  void lets_go(const SavedStorage& saved);
  /// What is allocated from the latest `return_begins` to here is a block, which would not be there at all: see SmallBlock. Its
  /// members are let go of behind this.
  void gathered(const SavedStorage& block);
  /// `only_copies`: bytes on the device, now, that nobody needs but copies that may still be under way.
  void look(std::int64_t only_copies);
  /// What is allocated from here to `came_back` is for bytes that are reloaded, from here to `gathered` for a block.
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
