#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include "runtime/replayed_memory.h"
#include "runtime/runtime.h"

namespace sidestream {

/// What became of the storages of outputs.
struct OutputCounts {
  OutputCounts& operator+=(const OutputCounts& other) noexcept {
    reused += other.reused;
    copied += other.copied;
    copied_bytes += other.copied_bytes;
    return *this;
  }

  std::uint64_t reused = 0;  ///< nobody held it: given out again
  std::uint64_t copied = 0;  ///< somebody did: the bytes were copied out first
  std::uint64_t copied_bytes = 0;
};

/// The memory of one storage that a captured forward makes and gives out, whichever of its outputs are views of it. Replays give
/// out one storage object for as long as nobody else holds it.
///
/// Note [Outputs are ordinary tensors]
/// The graph writes the memory again at each replay, and others may do so before (ReleasedOutputs), while a caller may hold a
/// tensor over it: an output, a view or detached copy of one, what an operator outside of graphs saved. So before the launch that
/// overwrites it, the bytes are copied to ordinary memory and the held storage is given that memory in place of this: all tensors
/// over it are as they were. With A the stream that the output was given out on, M the one that the call is made on now, U those
/// named by record_stream:
///
///   held          U: record    A: wait for U, copy, record    U and M: wait for A
///   not held      A and U: record    M: wait for them
///
/// Work that was queued before the exchange has the old address: the launch is behind all that A and U were given by now, as
/// the allocator is before it lends freed memory to another stream. Work that is queued later has the new one, and is behind
/// the copy. The new memory belongs to A, as the output's would in plain training, and is held for U too. In nearly all
/// programs A is M and there is no U: nothing is waited for.
/// Threads: one at a time; `users` of the memory may be added on any.
class OutputStorage {
 public:
  /// `captured`: as the capture made it.
  explicit OutputStorage(c10::Storage captured);

  /// While graphs are captured, when those to come do not need the memory: they may use it, and overwrite it from then on.
  void give_back_to(std::shared_ptr<const MemoryPool> pool) { memory_->give_back_to(std::move(pool)); }

  [[nodiscard]] bool given_back() const noexcept { return memory_->given_back(); }

  /// Before a launch that overwrites the memory, on the current stream: its own graph's, that of an earlier forward of the
  /// sequence, whose temporaries lie there too, or that of any graph which was captured when the memory was back in the pool. `mark`
  /// is recorded anew for each wait.
  /// Throws: what the allocator throws where there is no room for a copy; nothing has changed then.
  void before_overwrite(Runtime& runtime, const Event& mark, OutputCounts& counts);
  /// The storage object of the replay that was just launched, given out on the current stream. Allocates only where a held one
  /// was given other memory.
  [[nodiscard]] const c10::Storage& give(c10::Stream current);

  /// True for the storage of the latest replay, also where it was given other memory in between.
  [[nodiscard]] bool gave(const c10::Storage& storage) const noexcept;
  /// Somebody has a tensor over the memory.
  [[nodiscard]] bool held() const noexcept { return over_memory() && given_.use_count() > 1; }
  [[nodiscard]] const c10::Storage& captured() const noexcept { return memory_->captured(); }
  [[nodiscard]] bool is(const c10::Storage& captured) const noexcept {
    return memory_->captured().unsafeGetStorageImpl() == captured.unsafeGetStorageImpl();
  }

 private:
  /// Over the memory still: whoever holds a storage may have given it other memory (`resize_`).
  [[nodiscard]] bool over_memory() const noexcept {
    return given_ && ReplayedMemory::of(given_.data_ptr()) == memory_.get();
  }
  void copy_out(Runtime& runtime, const Event& mark, c10::Stream from, const ReplayedMemory::Streams& users);

  c10::intrusive_ptr<ReplayedMemory> memory_;
  c10::Storage given_;  ///< null before the first replay, and where a held one was given other memory
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> moved_;  ///< that one, until the next replay
  std::optional<c10::Stream> given_on_;
  bool given_since_ = false;  ///< since the latest `before_overwrite`
};

}  // namespace sidestream
