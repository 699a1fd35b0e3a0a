#pragma once
#include <memory>

#include <c10/core/TensorOptions.h>
#include <gtest/gtest.h>

#include "runtime/runtime.h"
#include "sidestream/error.h"
#include "tested_gpu.h"

namespace sidestream::gpu {

/// Skips where there is no usable GPU; SIDESTREAM_REQUIRE_GPU=1 makes a skip a failure of the program.
class Gpu : public testing::Test {
 protected:
  void SetUp() override {
    try {
      runtime_ = make_runtime(testing_model::tested_gpu());
    } catch (const Error& error) {
      GTEST_SKIP() << error.what();
    }
  }

  [[nodiscard]] Runtime& runtime() const { return *runtime_; }
  [[nodiscard]] c10::TensorOptions options() const {
    return c10::TensorOptions().dtype(at::kFloat).device(runtime_->device());
  }

 private:
  std::shared_ptr<Runtime> runtime_;
};

}  // namespace sidestream::gpu
