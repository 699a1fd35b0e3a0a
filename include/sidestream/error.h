#pragma once
#include <stdexcept>
#include <string>

#include "sidestream/detail/export.h"

namespace sidestream {

/// Base of everything that Sidestream throws. One line: what went wrong, where, and the remedy.
/// Threads: any. An Error thrown from autograd's device thread reaches the caller of `backward` with its type.
class SIDESTREAM_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller broke a rule of the interface (wrong shape at replay, second backward, unknown name, K = 0, ...).
/// The engine's state is unchanged and stays usable.
class SIDESTREAM_API UsageError : public Error {
 public:
  using Error::Error;
};

/// The device or its driver refused a call. Carries the status code; the driver's sticky-free "last error" is cleared.
class SIDESTREAM_API DeviceError : public Error {
 public:
  explicit DeviceError(const std::string& message, int status = 0) : Error(message), status_(status) {}

  /// The driver's status code; 0 where the backend has none.
  [[nodiscard]] int status() const noexcept { return status_; }

 private:
  int status_;
};

/// A graph capture failed or was invalidated. Nothing of it is left: the stream is not capturing, the pool is released.
class SIDESTREAM_API CaptureError : public Error {
 public:
  using Error::Error;
};

/// A replay gave other numbers than the same call run eagerly (Options::verify_replays). Says which call, which of its outputs,
/// buffers or gradients, and the first element that differs with both values. The engine stays usable.
class SIDESTREAM_API VerificationError : public Error {
 public:
  using Error::Error;
};

}  // namespace sidestream
