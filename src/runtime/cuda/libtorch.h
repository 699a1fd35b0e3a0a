#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include <c10/core/Stream.h>
#include <cuda_runtime_api.h>

#include "runtime/runtime.h"

// What the backend needs of LibTorch's own CUDA parts. Its sources are the only files that include `c10/cuda` and `ATen/cuda`.
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
/// The driver's stream of `stream`; null for the default stream. No driver call.
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

}  // namespace sidestream::cuda::libtorch
