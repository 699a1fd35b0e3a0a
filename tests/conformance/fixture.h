#pragma once
#include <string>

#include <c10/core/Device.h>
#include <gtest/gtest.h>

namespace sidestream::conformance {

/// What a program of these tests runs them on.
struct Subject {
  c10::Device device;
  std::string
      missing;  ///< why it cannot; `device` is then the simulated one, so that fixtures can be made until SetUp skips
};
/// Each program that links these tests has its own: the simulated device, or a GPU.
[[nodiscard]] const Subject& subject();

/// A test that is the same on the simulated device and on a GPU; there on deterministic kernels.
class ConformanceTest : public testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;
  [[nodiscard]] bool on_gpu() const { return device_.is_cuda(); }

  const c10::Device device_ = subject().device;

 private:
  // As they were before the test.
  bool deterministic_ = false;
  bool warns_only_ = false;
  bool fills_ = false;
};

}  // namespace sidestream::conformance
