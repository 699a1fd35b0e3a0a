#include "runtime/cuda/runtime.h"
#include "sidestream/error.h"

namespace sidestream {

std::shared_ptr<Runtime> make_cuda_runtime(c10::Device device) {
  throw UsageError("device " + device.str() +
                   " needs the cuda backend, which this build leaves out (LibTorch without CUDA); use --device sim");
}

void hear_libtorch_on_cuda() {}

}  // namespace sidestream
