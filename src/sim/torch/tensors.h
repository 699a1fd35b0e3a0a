#pragma once
#include <torch/library.h>

namespace sidestream::sim {

/// Registers what makes, views, resizes and copies sim tensors: these touch metadata or cross to host memory, so they have
/// kernels of their own instead of the fallback. Called once, by register_sim_device.
void register_tensors(torch::Library& aten);

/// Registers copies for the key Conjugate or Negative. LibTorch's fallback for these keys copies arguments first, so a copy would call
/// itself. Nor does a schema say that these operators write their destination. Called once for each, by register_sim_device.
void register_lazy_copies(torch::Library& aten);

/// Grows or shrinks a sim storage to `bytes`, its content kept.
void resize_storage(const c10::Storage& storage, std::size_t bytes);

}  // namespace sidestream::sim
