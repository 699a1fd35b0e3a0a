#pragma once
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

namespace sidestream::cuda {

/// The edges of `graph`, from and to. The function that gives them has another form in CUDA 12 than in 13.
/// Throws: DeviceError.
[[nodiscard]] std::vector<std::pair<cudaGraphNode_t, cudaGraphNode_t>> edges_of(cudaGraph_t graph);

}  // namespace sidestream::cuda
