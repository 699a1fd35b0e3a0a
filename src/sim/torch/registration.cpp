#include "sim/torch/registration.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceType.h>
#include <sidestream/error.h>
#include <torch/library.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>

#include "runtime/backend.h"
#include "sim/device/device.h"
#include "sim/device/sim_runtime.h"
#include "sim/torch/autocast.h"
#include "sim/torch/cpu_allocator.h"
#include "sim/torch/device_guard.h"
#include "sim/torch/fused_kernels.h"
#include "sim/torch/generator.h"
#include "sim/torch/operators.h"
#include "sim/torch/tensors.h"

namespace sidestream::sim {
namespace {

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*index*/) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex /*index*/) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex /*index*/) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex /*index*/) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex /*index*/) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex /*index*/) const override { return make_generator(); }
  at::Device getDeviceFromPtr(void* /*data*/) const override { return sim_device(); }
  bool isPinnedPtr(const void* data) const override { return Device::get().pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

/// The device's memory as SIDESTREAM_SIM_MEMORY sets it; not set without that variable.
std::optional<std::size_t> memory_by_environment() {
  const char* const text = std::getenv("SIDESTREAM_SIM_MEMORY");
  if (text == nullptr || *text == '\0') {
    return std::nullopt;
  }
  std::size_t bytes = 0;
  const char* const end = text + std::strlen(text);
  if (const auto read = std::from_chars(text, end, bytes); read.ec != std::errc() || read.ptr != end || bytes == 0) {
    throw UsageError("SIDESTREAM_SIM_MEMORY is \"" + std::string(text) +
                     "\"; give the bytes that the sim device has, for example 268435456, or unset it");
  }
  return bytes;
}

void register_all() {
  const std::optional<std::size_t> memory = memory_by_environment();
  const std::string current = c10::get_privateuse1_backend();
  if (c10::is_privateuse1_backend_registered() && current != "sim") {
    throw UsageError("the process already has a PrivateUse1 device named " + current +
                     "; the sim device must be the only one");
  }
  c10::register_privateuse1_backend("sim");
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  register_allocators();
  register_device_guard();
  // Registrations end with their Library object: these live as long as the process.
  static auto* const libraries = new std::deque<torch::Library>();
  const auto library = [](const char* space, c10::DispatchKey key) -> torch::Library& {
    return libraries->emplace_back(torch::Library::IMPL, space, key, __FILE__, __LINE__);
  };
  torch::Library& aten = library("aten", c10::DispatchKey::PrivateUse1);
  register_tensors(aten);
  register_lazy_copies(library("aten", c10::DispatchKey::Conjugate));
  register_lazy_copies(library("aten", c10::DispatchKey::Negative));
  register_attention(aten);
  register_convolution(aten);
  register_dropout(aten);
  register_recurrent(aten);
  register_recurrent(library("aten", c10::DispatchKey::AutogradPrivateUse1));
  register_operators(library("_", c10::DispatchKey::PrivateUse1), aten);
  register_autocast(library("_", c10::DispatchKey::AutocastPrivateUse1),
                    library("aten", c10::DispatchKey::AutocastPrivateUse1));
  if (memory) {
    Device::get().set_memory_limit(*memory);
  }
}

std::shared_ptr<Runtime> make_runtime_of(c10::Device device) {
  check_index(device);
  register_sim_device();
  return std::make_shared<SimRuntime>();
}

Availability available() { return {}; }

void observe() {}  // the device guard always tells

std::string tell_waits() { return {}; }  // as do operators and copies
void leave_waits() noexcept {}

const BackendRegistration registration({"sim", kDeviceType, true, available, make_runtime_of, observe, tell_waits,
                                        leave_waits});

}  // namespace

void register_sim_device() {
  static auto* const once = new std::once_flag();
  std::call_once(*once, register_all);
}

}  // namespace sidestream::sim
