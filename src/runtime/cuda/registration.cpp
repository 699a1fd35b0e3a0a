#include <memory>

#include "runtime/backend.h"
#include "runtime/cuda/cuda_runtime.h"
#include "runtime/cuda/driver.h"
#include "runtime/cuda/driver_calls.h"
#include "runtime/cuda/libtorch_order.h"
#include "sidestream/error.h"

namespace sidestream::cuda {
namespace {

std::shared_ptr<Runtime> make(c10::Device device) {
  if (const Availability driver = ask_driver(); driver.state != Availability::State::usable) {
    throw DeviceError("no usable GPU for " + device.str() + ": " + driver.reason +
                      "; the simulated device works without one: find_device(\"sim\")");
  }
  int count = 0;
  (void)cudaGetDeviceCount(&count);
  const c10::Device indexed(c10::DeviceType::CUDA, device.has_index() ? device.index() : c10::DeviceIndex{0});
  if (indexed.index() >= count) {
    throw DeviceError("device " + indexed.str() + " does not exist: this machine has " + std::to_string(count) +
                      " CUDA device(s), cuda:0 is the first; the simulated device works too: find_device(\"sim\")");
  }
  libtorch::initialise();
  hear_uses();
  libtorch::settle_attention_order(indexed);
  return std::make_shared<CudaRuntime>(indexed);
}

const BackendRegistration registration({"cuda", c10::DeviceType::CUDA, false, ask_driver, make, hear_libtorch,
                                        hear_driver_calls, leave_driver_calls});

}  // namespace
}  // namespace sidestream::cuda
