#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include "graphs/outputs/storage_holders.h"
#include "runtime/replayed_memory.h"
#include "runtime/runtime.h"

namespace sidestream {

/// The memory of one storage that a captured forward makes and gives out. Several outputs may be views of it. Replays give out the same
/// storage object as long as no other code holds it.
///
/// Note [Outputs are ordinary tensors]
/// Each replay of the graph writes the memory again, and other graphs may write it before (SequenceOutputs). Meanwhile a caller may hold a
/// tensor in it: an output, a view of one, or a tensor that an eager operator saved. So before the launch that overwrites the memory, the
/// bytes are copied to ordinary memory, and the held storage gets that memory instead. All tensors in the storage keep their values. A is
/// the stream that the output was given out on, M the one that the call is made on now, and U are those named by record_stream:
///
///   held          U and M: record    A: wait for them, copy, record    U and M: wait for A
///   not held      A and U: record    M: wait for them
///
/// M may have changed the held tensor without record_stream: a reference and an event are enough for that in plain training. Work that was
/// queued before the exchange has the old address. The launch is after all work that A and U were given by then, as it is before the
/// allocator lends freed memory to another stream. Work that is queued later has the new address, and is after the copy. The new memory
/// belongs to A, as the output's would in plain training, and is held for U too. In nearly all programs A is M and there is no U: then no
/// stream waits.
/// Threads: one at a time; `users` of the memory may be added on any.
class OutputStorage {
 public:
  /// What became of the storages of outputs.
  struct Counts {
    Counts& operator+=(const Counts& other) noexcept {
      reused += other.reused;
      copied += other.copied;
      copied_bytes += other.copied_bytes;
      return *this;
    }

    std::uint64_t reused = 0;  ///< no reference was left: given out again
    std::uint64_t copied = 0;  ///< references were left: the bytes were copied out first
    std::uint64_t copied_bytes = 0;
  };

  /// `captured`: as the capture made it.
  explicit OutputStorage(c10::Storage captured);

  /// While graphs are captured, if those to come do not need the memory: from then on they may overwrite it.
  void give_back_to(std::shared_ptr<const MemoryPool> pool) { memory_->give_back_to(std::move(pool)); }

  [[nodiscard]] bool given_back() const noexcept { return memory_->given_back(); }

  /// Before a launch that overwrites the memory, on the current stream: its own graph's, that of an earlier forward of the
  /// sequence, whose temporaries lie there too, or that of any graph which was captured when the memory was back in the pool. `mark`
  /// is recorded anew for each wait.
  /// Throws: what the allocator throws if there is no room for a copy; nothing has changed then.
  void before_overwrite(Runtime& runtime, const Event& mark, Counts& counts);
  /// The storage object of the replay that was just launched, given out on the current stream. Allocates only if a held one was given
  /// other memory.
  [[nodiscard]] const c10::Storage& give(c10::Stream current);

  /// True for the storage of the latest replay, also if it was given other memory since.
  [[nodiscard]] bool gave(const c10::Storage& storage) const noexcept;
  /// Code outside of this object has a tensor in the memory.
  [[nodiscard]] bool held() const noexcept { return over_memory() && others_hold(given_, 1); }
  [[nodiscard]] const c10::Storage& captured() const noexcept { return memory_->captured(); }
  [[nodiscard]] bool is(const c10::Storage& captured) const noexcept {
    return memory_->captured().unsafeGetStorageImpl() == captured.unsafeGetStorageImpl();
  }

 private:
  /// Still in the memory: a holder may have given the storage other memory (`resize_`).
  [[nodiscard]] bool over_memory() const noexcept {
    return given_ && ReplayedMemory::of(given_.data_ptr()) == memory_.get();
  }
  void copy_out(Runtime& runtime, const Event& mark, c10::Stream from, c10::Stream now,
                const ReplayedMemory::Streams& users);

  c10::intrusive_ptr<ReplayedMemory> memory_;
  c10::Storage given_;  ///< null before the first replay, and if a held one was given other memory
  std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> moved_;  ///< that one, until the next replay
  std::optional<c10::Stream> given_on_;
  bool given_since_ = false;  ///< since the latest `before_overwrite`
};

}  // namespace sidestream
