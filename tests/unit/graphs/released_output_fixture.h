#pragma once
#include <cstdint>

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include "models/layer_stack.h"
#include "sidestream/device.h"
#include "sidestream/options.h"

namespace sidestream::testing_model {

/// Outputs that other calls of a sequence take as inputs, all that is saved of them leaving.
class ReleasedOutputTest : public testing::Test {
 protected:
  static constexpr std::int64_t kLayers = 8;
  static constexpr std::int64_t kOutputBytes = 16 * kHidden * 4;

  [[nodiscard]] Options options() const { return Options(device_).offload("**").min_bytes(1024); }
  static bool equal(const at::Tensor& a, const at::Tensor& b) { return at::equal(a.cpu(), b.cpu()); }

  c10::Device device_ = find_device("sim");
};

}  // namespace sidestream::testing_model
