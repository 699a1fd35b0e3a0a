#pragma once
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

#include <ATen/core/Tensor.h>

#include "sidestream/engine.h"

namespace sidestream::testing_model {

/// Modules "waves.0" to "waves.5", each one call with the scope "act" that saves two storages of its own: the same on every
/// backend. Without indices, so that wrong numbers cannot become wrong addresses.
class Waves : public torch::nn::Module {
 public:
  Waves();
  at::Tensor forward(at::Tensor h);
  /// Gradient of the output's sum. Waits for nothing.
  at::Tensor gradient(const at::Tensor& x);

 private:
  torch::nn::ModuleList waves_;
};

/// Input number `n`, [rows, 64], the same for the same number; requires gradients.
[[nodiscard]] at::Tensor wave_input(std::uint64_t n, std::int64_t rows, c10::Device device);

/// Eager offload, or graphs on K side streams.
[[nodiscard]] Options wave_options(c10::Device device, std::int64_t side_streams);

/// What the engine itself asks of the device in the second step after planning and capture, by the journal: one line a site, streams
/// as letters in the order they are first met, "A.record B.wait B.copy_to_host". What operators do is left out: it is the backend's.
[[nodiscard]] std::vector<std::string> engine_operations(c10::Device device, std::int64_t side_streams);

/// The same for every backend.
[[nodiscard]] std::vector<std::string> expected_engine_operations(std::int64_t side_streams);

}  // namespace sidestream::testing_model
