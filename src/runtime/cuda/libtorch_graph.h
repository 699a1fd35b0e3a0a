#pragma once
#include <memory>

#include <ATen/core/Generator.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>
#include <cuda_runtime_api.h>

#include "runtime/cuda/libtorch.h"

namespace sidestream::cuda::libtorch {

/// Makes the calling thread's cuBLAS handle and its workspace for `stream`, so that a capture need not.
void warm_blas(c10::Stream stream);

/// Frees what cuBLAS keeps for `stream`, after the stream's work; see Note [Workspaces of a capture].
void forget_stream(cudaStream_t stream) noexcept;

/// One `at::cuda::CUDAGraph`. If the capture fails, its end removes all state of it.
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
  /// True if it draws random numbers: known once the capture has ended.
  [[nodiscard]] bool draws() const noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace sidestream::cuda::libtorch
