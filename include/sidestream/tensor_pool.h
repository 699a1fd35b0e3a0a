#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>

#include "sidestream/detail/export.h"

namespace sidestream {

/// The tensors of one shape and dtype in a TensorPool.
struct TensorPoolStatus {
  std::vector<std::int64_t> sizes;                     ///< the shape
  c10::ScalarType dtype = c10::ScalarType::Undefined;  ///< the dtype
  std::int64_t total = 0;                              ///< tensors in the pool
  std::int64_t in_use = 0;                             ///< allocated and not freed
  /// Tensors that `allocate` can hand out without new memory.
  [[nodiscard]] std::int64_t free() const noexcept { return total - in_use; }
  /// The part that is in use, from 0 to 1.
  [[nodiscard]] double utilization() const noexcept {
    return total == 0 ? 0 : static_cast<double>(in_use) / static_cast<double>(total);
  }
};

/// Counts of a TensorPool. Requests count from its construction on; the others are of now.
struct TensorPoolStatistics {
  std::int64_t allocation_requests = 0;     ///< calls of `allocate`: hits and misses
  std::int64_t free_requests = 0;           ///< calls of `free`, also those that were refused
  std::int64_t hits = 0;                    ///< requests that found a free tensor
  std::int64_t misses = 0;                  ///< requests that found none
  std::int64_t total = 0;                   ///< tensors in the pool
  std::int64_t in_use = 0;                  ///< allocated and not freed
  std::int64_t bytes = 0;                   ///< memory of all tensors in the pool, in use or not
  std::int64_t allocations_after_seal = 0;  ///< tensors that were made although the pool was sealed: must be 0
};

/// A pool of tensors, in pinned host memory or on a device. It keeps each tensor that it makes, and hands out the one of the same shape and
/// dtype that has been free for longest [OffloadTensorPool, GPUTensorPool].
///
///     sidestream::TensorPool pool(sidestream::TensorPool::Memory::host, device);
///     pool.plan({1024, 4096}, at::kBFloat16, 8);   // optional: makes 8 tensors now
///     pool.seal();                                 // from here on nothing is allocated
///     at::Tensor copy = pool.allocate({1024, 4096}, at::kBFloat16);
///     copy.copy_(activation, /*non_blocking=*/true);
///     ...
///     pool.free(copy);
///
/// The tensors are contiguous and not initialised. Host memory has exactly the bytes of its tensor. On a GPU in a system of several NUMA
/// nodes, it lies near the GPU, if the system allows.
/// If `stream` is not set, it is the calling thread's current stream on the device. Streams that are given live as long as the pool's
/// memory.
///
/// Work on the device needs no synchronization between `free` and the next `allocate`: see their Ordering. Host code that reads or writes
/// a host tensor synchronizes with `stream` first.
/// Capture: `allocate`, `free`, `plan` and `reset` throw UsageError on a stream that captures, because a graph would keep using the memory
/// after the pool hands it out again. The capture stays valid. Allocate before the capture, and free after the graph's last launch.
/// Threads: any.
class SIDESTREAM_API TensorPool {
 public:
  /// Where the tensors lie.
  enum class Memory : std::uint8_t { host, device };

  /// An empty pool for copies from and to `device` (host), or on `device`.
  /// Throws: UsageError or DeviceError if `device` cannot be used.
  TensorPool(Memory memory, c10::Device device);
  TensorPool(const TensorPool&) = delete;
  TensorPool& operator=(const TensorPool&) = delete;
  /// As `clear`.
  ~TensorPool();

  /// A tensor of this shape and dtype. Without a free one, makes it.
  /// Ordering: later work on `stream` waits for the work before the `free` of this memory.
  /// Throws: UsageError if there is no free one and the pool is sealed, and for a shape or dtype that no tensor has. DeviceError if
  /// there is no host memory. LibTorch's OutOfMemoryError if there is no device memory.
  [[nodiscard]] at::Tensor allocate(c10::IntArrayRef sizes, c10::ScalarType dtype,
                                    std::optional<c10::Stream> stream = std::nullopt);
  /// Takes a tensor back. A view or a detached alias of the tensor will do: the storage decides. Do not use the memory afterwards.
  /// Ordering: the next user of the memory waits for all work that `stream` has now. `stream` is the last that used the tensor.
  /// Throws: UsageError for a tensor that is already free, and for one that is not of this pool, or was allocated before `clear`.
  void free(const at::Tensor& tensor, std::optional<c10::Stream> stream = std::nullopt);

  /// Makes the tensors that this shape and dtype lacks to a total of `count`. If there is no memory, the pool keeps those it has made.
  /// Throws: UsageError after `seal`, and if `count` is negative; else as `allocate`.
  void plan(c10::IntArrayRef sizes, c10::ScalarType dtype, std::int64_t count);
  /// From here on, until `clear`, the pool allocates nothing: `allocate` finds a free tensor, or throws.
  void seal() noexcept;
  /// Takes back all tensors that are in use, as if they were freed on the current stream: for tensors that were dropped without `free`.
  /// Throws: UsageError if one of them is still referenced; nothing is changed then.
  void reset();
  /// Drops all tensors, and ends the seal: the pool is empty and can be filled again. Tensors that are still referenced keep their memory,
  /// and can no longer be freed into the pool. Statistics of requests go on.
  /// Ordering: memory is reused outside of the pool after the last use that `free` and `allocate` told of.  Capture: legal.
  void clear();

  /// One entry for each shape and dtype.  Capture: legal.
  [[nodiscard]] std::vector<TensorPoolStatus> status() const;
  /// The entry of one shape and dtype; its total is 0 if the pool has none.  Capture: legal.
  [[nodiscard]] TensorPoolStatus status(c10::IntArrayRef sizes, c10::ScalarType dtype) const;
  /// Counts of the whole pool.  Capture: legal.
  [[nodiscard]] TensorPoolStatistics statistics() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sidestream
