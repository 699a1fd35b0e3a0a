#pragma once
#include <atomic>
#include <memory>
#include <mutex>

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include "sidestream/detail/export.h"

namespace sidestream {

/// Device memory that a graph writes anew at each replay, given out as the memory of ordinary storages. Their data pointers are
/// known by their deleter: LibTorch's allocators take no notice of `record_stream` on such memory, so backends tell it here.
/// Threads: any.
class SIDESTREAM_API ReplayedMemory final : public c10::intrusive_ptr_target {
 public:
  using Streams = c10::SmallVector<c10::Stream, 2>;

  /// `captured` keeps the memory: for as long as this object or a storage that it made lives.
  explicit ReplayedMemory(c10::Storage captured) : captured_(std::move(captured)) {}

  /// Gives the memory back to its pool: later captures may use it as well, and whoever holds `captured` holds no memory any more.
  /// `pool` keeps it mapped instead.
  void give_back_to(std::shared_ptr<const void> pool);
  /// True after that: when its holders release the memory, graphs use it without a copy.
  [[nodiscard]] bool given_back() const noexcept { return pool_ != nullptr; }

  /// A new storage object over all of the memory, resizable as any.
  [[nodiscard]] c10::Storage make_storage();
  /// What `data` points to, or null if it is ordinary memory.
  [[nodiscard]] static ReplayedMemory* of(const c10::DataPtr& data) noexcept;
  /// Backends: work on `stream` uses the memory of `data` (`at::Tensor::record_stream`, and autograd's own calls of it). Nothing
  /// for ordinary memory.
  static void used_on(const c10::DataPtr& data, c10::Stream stream);

  [[nodiscard]] const c10::Storage& captured() const noexcept { return captured_; }
  /// Streams that were named since the last `forget_users`. Without any it costs one load.
  [[nodiscard]] Streams users() const;
  void forget_users();

 private:
  c10::Storage captured_;
  std::shared_ptr<const void> pool_;  ///< where the memory was given back
  std::atomic<bool> used_{false};
  mutable std::mutex mutex_;
  Streams users_;
};

}  // namespace sidestream
