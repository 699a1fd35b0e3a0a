#include "runtime/backend.h"

#include <dlfcn.h>

#include <algorithm>
#include <deque>
#include <mutex>

#include "sidestream/error.h"
#include "sidestream/version.h"

namespace sidestream {
namespace {

struct Registry {
  std::mutex mutex;
  std::deque<Backend> backends;  // never moved, never removed
};

Registry& registry() {
  static auto* const instance = new Registry();  // backends register before and are used after any static of ours
  return *instance;
}

template <class Matches>
const Backend* find(Matches matches) {
  Registry& known = registry();
  const std::lock_guard lock(known.mutex);
  const auto found = std::find_if(known.backends.begin(), known.backends.end(), matches);
  return found != known.backends.end() ? &*found : nullptr;
}

constexpr const char* kSimulator = "sim";

/// The folder of the library (or program) that this code lies in.
std::string own_folder() {
  Dl_info own{};
  if (dladdr(reinterpret_cast<const void*>(&own_folder), &own) == 0 || own.dli_fname == nullptr) {
    return {};
  }
  const std::string file = own.dli_fname;
  const std::size_t slash = file.rfind('/');
  return slash == std::string::npos ? std::string() : file.substr(0, slash + 1);
}

}  // namespace

BackendRegistration::BackendRegistration(const Backend& backend) {
  Registry& known = registry();
  const std::lock_guard lock(known.mutex);
  if (std::none_of(known.backends.begin(), known.backends.end(),
                   [&](const Backend& other) { return other.type == backend.type; })) {
    known.backends.push_back(backend);
  }
}

const Backend* find_backend(std::string_view name) {
  return find([&](const Backend& backend) { return backend.name == name; });
}

const Backend* find_backend(c10::DeviceType type) {
  return find([&](const Backend& backend) { return backend.type == type; });
}

std::vector<Backend> loaded_backends() {
  Registry& known = registry();
  const std::lock_guard lock(known.mutex);
  return {known.backends.begin(), known.backends.end()};
}

const Backend& load_simulator() {
  if (const Backend* backend = find_backend(kSimulator); backend != nullptr) {
    return *backend;
  }
  const std::string file = own_folder() + "libsidestream_sim.so." + std::to_string(SIDESTREAM_VERSION_MAJOR) + '.' +
                           std::to_string(SIDESTREAM_VERSION_MINOR);
  // Never closed: LibTorch keeps what a device registers until the very end.
  if (dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL) == nullptr) {
    const char* const reason = dlerror();
    throw UsageError("the library of the simulated device cannot be loaded: " +
                     std::string(reason != nullptr ? reason : file) + "; install it beside libsidestream.so");
  }
  const Backend* backend = find_backend(kSimulator);
  if (backend == nullptr) {
    throw UsageError(file +
                     " registers no simulated device: it belongs to another libsidestream.so; install both libraries "
                     "from one build");
  }
  return *backend;
}

std::shared_ptr<Runtime> make_runtime(c10::Device device) {
  const Backend* backend = find_backend(device.type());
  if (backend != nullptr) {
    return backend->make_runtime(device);
  }
  std::string names;
  for (const Backend& loaded : loaded_backends()) {
    names += std::string(names.empty() ? "" : ", ") + loaded.name;
  }
  throw UsageError("device " + device.str() + " has no runtime; those loaded are for: " +
                   (names.empty() ? "no device" : names) + ". Use the device that find_device returns");
}

}  // namespace sidestream
