#pragma once
#include <stdexcept>
#include <string>

#include "sidestream/detail/export.h"

namespace sidestream {

/// Base class of Sidestream's exceptions; c10::OutOfMemoryError is LibTorch's. The message is one line: what went wrong, where, the remedy.
/// Threads: any. An Error that is thrown on autograd's device thread reaches the caller of `backward` with its type.
class SIDESTREAM_API Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The caller broke a rule of the interface: an input of another shape at a replay, a second backward, an unknown name.
/// The engine stays usable.
class SIDESTREAM_API UsageError : public Error {
 public:
  using Error::Error;
};

/// The device or its driver refused a call. The driver's "last error" is cleared, unless it is one that the driver keeps for good.
class SIDESTREAM_API DeviceError : public Error {
 public:
  /// `status` is the driver's status code, 0 if there is none.
  explicit DeviceError(const std::string& message, int status = 0) : Error(message), status_(status) {}

  /// The driver's status code; 0 if the device has no such codes.
  [[nodiscard]] int status() const noexcept { return status_; }

 private:
  int status_;
};

/// A graph capture failed or was invalidated. Nothing of it is left: the stream is not capturing and the memory pool is released.
class SIDESTREAM_API CaptureError : public Error {
 public:
  using Error::Error;
};

/// A replay gave other numbers than the same call run eagerly (see Options::verify_replays). The message names the call and the
/// output, buffer or gradient, and gives the first element that differs with both values. The engine stays usable.
class SIDESTREAM_API VerificationError : public Error {
 public:
  using Error::Error;
};

}  // namespace sidestream
