#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include <ATen/core/Generator.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>
#include <cuda_runtime_api.h>

#include "runtime/runtime.h"

// What the backend needs of LibTorch's own CUDA parts. libtorch.cpp is the only file that includes `c10/cuda` and `ATen/cuda`.
namespace sidestream::cuda::libtorch {

/// LibTorch's identifier of a private memory pool.
using PoolId = std::pair<unsigned long long, unsigned long long>;

/// Makes `device` current for the calling thread, as LibTorch counts it, and gives the one before.
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
/// Makes `device` current again; where it has no context it gets none until something is asked of it. Failures go to stderr.
void return_to_device(c10::DeviceIndex device) noexcept;
/// The name of the allocator of CUDA memory: "native" is LibTorch's caching one.
[[nodiscard]] std::string allocator_name();

/// Makes LibTorch initialise CUDA. Throws: c10::Error when it cannot.
void initialise();
/// Lets LibTorch choose in which order it tries its attention kernels on `device`, which it does at the first attention of the process
/// otherwise: a mode of the process that changes in the middle of a first step, and that captures depend on.
void settle_attention_order(c10::Device device);
/// The driver's stream behind `stream`; null for the default stream. Asks the driver nothing.
[[nodiscard]] cudaStream_t native_stream(c10::Stream stream);
[[nodiscard]] c10::Stream wrap_stream(cudaStream_t stream, c10::Device device);
[[nodiscard]] c10::Stream current_stream(c10::Device device);
void set_current_stream(c10::Stream stream);

[[nodiscard]] MemoryStats memory_stats(c10::Device device);
/// From the first call on, and for good: what the caching allocator was last refused.
[[nodiscard]] MemoryRefusal latest_refusal(c10::Device device);
/// Bytes that the caching allocator may hold at most of `total`.
[[nodiscard]] std::int64_t allocator_limit(c10::Device device, std::int64_t total);
void reset_peak_memory_stats(c10::Device device);
void release_cached_memory();
/// From here on, and for good, `freed` hears of every block that tensors give back to the caching allocator, under its lock.
void hear_frees(std::function<void(const void* block, std::size_t bytes)> freed);

/// From here on, and for good, at::Tensor::record_stream tells ReplayedMemory too: the caching allocator takes no notice of data
/// pointers that are not its own.
void hear_record_stream();

/// A new pool with one reference; a graph captured into it holds another.
[[nodiscard]] PoolId create_pool(c10::Device device);
void release_pool(c10::Device device, PoolId pool) noexcept;
/// Bytes of the pool's blocks that tensors hold.
[[nodiscard]] std::int64_t allocated_in(PoolId pool);

/// Makes the calling thread's cuBLAS handle and its workspace for `stream`, so that a capture need not.
void warm_blas(c10::Stream stream);

/// Frees what LibTorch keeps for `stream`, which is idle and about to be destroyed.
void forget_stream(cudaStream_t stream) noexcept;

/// One `at::cuda::CUDAGraph` with an ending that leaves nothing behind when the capture failed.
/// Threads: begun and ended by one thread; launched by one at a time.
class Graph {
 public:
  Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph();

  /// Begins to capture `stream` into `pool` in thread-local error mode. Each launch will draw on from the default generator and from
  /// `generators`. On failure nothing is left and it throws.
  void begin(c10::Stream stream, PoolId pool, c10::ArrayRef<at::Generator> generators);
  /// Ends the capture; on anything but success nothing of it is left. Does not instantiate.
  [[nodiscard]] cudaError_t end() noexcept;
  /// Makes it ready to be launched, its own memory on the device included, by way of `stream`. May be tried again when it failed.
  [[nodiscard]] cudaError_t instantiate(c10::Stream stream);
  /// Queues one run on `stream`, after the seed and offset of each generator for it.
  void launch(c10::Stream stream);
  [[nodiscard]] cudaGraph_t native() const noexcept;
  /// True where it draws random numbers: known once the capture has ended.
  [[nodiscard]] bool draws() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sidestream::cuda::libtorch
