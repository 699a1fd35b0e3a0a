#pragma once
#include <cstddef>

#include <ATen/core/Tensor.h>

namespace sidestream::sim {

/// `aten::_copy_from`: copies `source` into `destination`, broadcast, strided and converted as the CPU does; one of them or
/// both are sim tensors. Returns `destination`.
/// Ordering: on the current stream. To or from host memory that is not pinned, or without `non_blocking`, the host waits.
/// Capture: legal between sim tensors, and without blocking to or from pinned memory.
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking);

/// Copies device bytes to another block on the current stream.
void copy_bytes(void* destination, const void* source, std::size_t bytes);

}  // namespace sidestream::sim
