#include "runtime/cuda/driver.h"

namespace sidestream::cuda {
namespace {

/// Oldest driver branch that runs programs of a CUDA major version (CUDA's minor version compatibility).
const char* oldest_driver(int runtime_version) {
  const int major = runtime_version / 1000;
  return major >= 13 ? "580" : major == 12 ? "525" : "450";
}

std::string needed() {
  return "CUDA " + version_words(CUDART_VERSION) + " needs an NVIDIA driver " + oldest_driver(CUDART_VERSION) +
         " or newer";
}

}  // namespace

std::string version_words(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

Availability judge_driver(cudaError_t status, int devices, int driver_version) {
  using State = Availability::State;
  if (status == cudaSuccess && devices > 0) {
    return {State::usable, ""};
  }
  if (status == cudaErrorNoDevice || status == cudaSuccess) {
    return {State::absent, "the NVIDIA driver shows no device (is one there, and in CUDA_VISIBLE_DEVICES?)"};
  }
  if ((status == cudaErrorInsufficientDriver || status == cudaErrorStubLibrary) && driver_version == 0) {
    return {State::absent, "no NVIDIA driver is installed; " + needed()};
  }
  return {State::broken,
          "the NVIDIA driver" +
              (driver_version > 0 ? " (for CUDA " + version_words(driver_version) + ")" : std::string()) +
              " does not work: " + cudaGetErrorString(status) + "; " + needed()};
}

Availability ask_driver() {
  int devices = 0;
  const cudaError_t status = cudaGetDeviceCount(&devices);
  int driver_version = 0;
  if (cudaDriverGetVersion(&driver_version) != cudaSuccess) {
    driver_version = 0;
  }
  (void)cudaGetLastError();
  return judge_driver(status, devices, driver_version);
}

}  // namespace sidestream::cuda
