#pragma once
#include <ATen/Context.h>

#include "gpu/gpu_fixture.h"
#include "models/block_model.h"

namespace sidestream::gpu {

/// A BlockModel's training on deterministic kernels, so that it can be compared with its plain twin bit for bit.
class GpuBlocks : public Gpu {
 protected:
  static constexpr std::int64_t kSteps = 6;

  void SetUp() override {
    Gpu::SetUp();
    at::globalContext().setDeterministicAlgorithms(!IsSkipped(), /*warn_only=*/false);
    at::globalContext().setDeterministicFillUninitializedMemory(false);
  }
  void TearDown() override { at::globalContext().setDeterministicAlgorithms(false, false); }

  [[nodiscard]] testing_model::BlockTraining train(
      const std::function<std::unique_ptr<OffloadEngine>(testing_model::BlockModel&)>& engine = {}) const {
    return {{.layers = 6, .hidden = 256, .heads = 4, .sequence = 128, .batch = 4}, device_, kSteps, engine};
  }

  c10::Device device_ = testing_model::tested_gpu();
};

}  // namespace sidestream::gpu
