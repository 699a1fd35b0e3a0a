#include "runtime/cuda/driver.h"

#include <string>

#include <gtest/gtest.h>

namespace sidestream::cuda {
namespace {

using State = Availability::State;

TEST(CudaDriverTest, ADriverThatShowsADeviceIsUsable) {
  const Availability found = judge_driver(cudaSuccess, 1, 13000);
  EXPECT_EQ(found.state, State::usable);
  EXPECT_EQ(found.reason, "");
}

TEST(CudaDriverTest, NoDriverAndNoDeviceAreAbsent) {
  const Availability no_driver = judge_driver(cudaErrorInsufficientDriver, 0, 0);
  EXPECT_EQ(no_driver.state, State::absent);
  EXPECT_NE(no_driver.reason.find("no NVIDIA driver is installed"), std::string::npos) << no_driver.reason;
  EXPECT_NE(no_driver.reason.find("or newer"), std::string::npos) << no_driver.reason;
  for (const Availability& no_device :
       {judge_driver(cudaErrorNoDevice, 0, 13000), judge_driver(cudaSuccess, 0, 13000)}) {
    EXPECT_EQ(no_device.state, State::absent);
    EXPECT_NE(no_device.reason.find("CUDA_VISIBLE_DEVICES"), std::string::npos) << no_device.reason;
  }
  EXPECT_EQ(judge_driver(cudaErrorStubLibrary, 0, 0).state, State::absent) << "a toolkit's stub is no driver";
}

TEST(CudaDriverTest, ADriverThatIsThereAndFailsIsBroken) {
  for (const cudaError_t status : {cudaErrorInitializationError, cudaErrorSystemDriverMismatch, cudaErrorUnknown,
                                   cudaErrorSystemNotReady, cudaErrorDevicesUnavailable, cudaErrorECCUncorrectable}) {
    const Availability found = judge_driver(status, 0, 13000);
    EXPECT_EQ(found.state, State::broken) << cudaGetErrorName(status);
    EXPECT_NE(found.reason.find(cudaGetErrorString(status)), std::string::npos) << found.reason;
  }
  const Availability too_old = judge_driver(cudaErrorInsufficientDriver, 0, 11040);
  EXPECT_EQ(too_old.state, State::broken);
  EXPECT_NE(too_old.reason.find("for CUDA 11.4"), std::string::npos) << too_old.reason;
}

}  // namespace
}  // namespace sidestream::cuda
