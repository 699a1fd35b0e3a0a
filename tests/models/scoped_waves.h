#pragma once
#include <cstdint>

#include <ATen/core/Tensor.h>

#include "sidestream/options.h"

namespace sidestream::testing_model {

constexpr int kWaves = 6;

/// The gradient of `x` through the calls "waves.0" to "waves.5", each with a scope "act" that saves two storages of its own: the
/// same on every backend. Without parameters, and without indices, so that wrong numbers cannot become wrong addresses. Waits
/// for nothing.
[[nodiscard]] at::Tensor scoped_wave_gradient(const at::Tensor& x);

/// Input number `n`, [rows, 64], the same for the same number; requires gradients.
[[nodiscard]] at::Tensor scoped_wave_input(std::uint64_t n, std::int64_t rows, c10::Device device);

/// Eager offload, or graphs on K side streams.
[[nodiscard]] Options scoped_wave_options(c10::Device device, std::int64_t side_streams);

}  // namespace sidestream::testing_model
