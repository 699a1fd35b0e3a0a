#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include "runtime/live_memory.h"
#include "runtime/runtime.h"

namespace sidestream {

struct SavedStorage;

/// The memory of a sizing step: its peak, and at least how high the peak would have been without offload.
///
/// A storage is away while autograd needs its bytes and no memory of the device holds them. For the time between two looks this class takes
/// the peak of live bytes and adds the bytes that were away at one of the two looks, the fewer ones. So the mover looks before and after
/// it frees or allocates memory, and when backward asks for a tensor. What the program or autograd frees in between may be missing.
/// Threads: one at a time. Throws: as Runtime::memory_stats.
class SizingPeak {
 public:
  /// The step begins. `runtime` must outlive this object.
  explicit SizingPeak(Runtime& runtime);

  /// The mover frees the device memory of `saved`. The program may still hold that memory.
  void released(const std::shared_ptr<SavedStorage>& saved);
  /// `only_copies`: bytes on the device that autograd needs no more, and that copies may still read or write.
  void look(std::int64_t only_copies);

  /// At the latest look, less what is on the device only because of offload.
  [[nodiscard]] std::int64_t away() const noexcept { return away_; }
  /// What the device really had.
  [[nodiscard]] LiveMemory::Peak peak() { return step_.peak(); }
  /// Live bytes without offload: at least so many.
  [[nodiscard]] std::int64_t without_offload();

 private:
  struct Released {
    std::weak_ptr<SavedStorage> saved;
    c10::weak_intrusive_ptr<c10::StorageImpl> memory;
  };
  /// Bytes that are away now, less those that the device holds twice. Forgets storages that autograd needs no more.
  [[nodiscard]] std::int64_t count();

  Runtime* runtime_;
  LiveMemory::Measurement step_;
  std::optional<LiveMemory::Measurement> since_look_;
  std::vector<Released> released_;
  std::int64_t away_ = 0;
  std::int64_t without_offload_ = 0;
};

}  // namespace sidestream
