#include <sidestream/error.h>

#include "runtime/cuda/runtime.h"
#include "runtime/runtime.h"
#include "sim/device/sim_runtime.h"

namespace sidestream {

std::shared_ptr<Runtime> make_runtime(c10::Device device) {
  if (device.type() == c10::DeviceType::CUDA) {
    return make_cuda_runtime(device);
  }
  if (device.type() == c10::DeviceType::PrivateUse1) {
    return sim::make_sim_runtime(device);
  }
  throw UsageError("device " + device.str() + " has no runtime; use cuda or sim");
}

}  // namespace sidestream
