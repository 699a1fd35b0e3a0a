#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/Device.h>

#include "runtime/runtime.h"
#include "sidestream/detail/export.h"

namespace sidestream {

/// Whether a backend can serve in this process.
struct Availability {
  enum class State : std::uint8_t {
    usable,
    absent,  ///< the device is not present, or this build does not contain the backend
    broken,  ///< driver or device is there and does not work
  };
  State state = State::usable;
  std::string reason;  ///< why not, with the remedy; empty if it is usable
};

/// A backend as the rooms above the runtime see it. Plain data, which it registers itself.
struct Backend {
  const char* name = "";  ///< as find_device takes it, without an index
  c10::DeviceType type = c10::DeviceType::CPU;
  bool simulated = false;  ///< computes on the CPU; `auto` takes it last
  Availability (*availability)() = nullptr;
  /// The runtime of one of its devices (index 0 when it has none). Throws: UsageError for a device that it has not; DeviceError
  /// where it is absent or broken, with the reason.
  std::shared_ptr<Runtime> (*make_runtime)(c10::Device device) = nullptr;
  /// Tells DeviceListeners from here on what LibTorch itself asks of its devices; later calls do nothing.
  void (*observe)() = nullptr;
  /// From here on, tells `host_waits` of waits that bypass every Runtime, until `leave_waits` was called as often. Returns in words what
  /// it cannot hear, with the remedy; empty if it hears everything.
  std::string (*tell_waits)() = nullptr;
  void (*leave_waits)() noexcept = nullptr;
};

/// Makes a backend known for the life of the process: a static object beside the backend. A second backend of one device type
/// is ignored. Threads: any.
class SIDESTREAM_API BackendRegistration {
 public:
  explicit BackendRegistration(const Backend& backend);
};

/// Null for a name or type that no loaded backend has. Threads: any.
[[nodiscard]] const Backend* find_backend(std::string_view name);
[[nodiscard]] const Backend* find_backend(c10::DeviceType type);
/// All that are loaded, in the order of their registration.
[[nodiscard]] std::vector<Backend> loaded_backends();

/// The simulated backend. If it is not linked into the process, its library is loaded from beside this one; it stays loaded.
/// Threads: any.  Throws: UsageError that names the file when it is not there or does not load.
[[nodiscard]] const Backend& load_simulator();

}  // namespace sidestream
