#pragma once
#include <c10/core/Stream.h>

#include "runtime/runtime.h"

namespace sidestream {

/// A capture on `stream`, which is abandoned if an exception ends the scope while it is open.
class [[nodiscard]] CaptureGuard {
 public:
  CaptureGuard(Runtime& runtime, c10::Stream stream, const MemoryPool& pool, c10::ArrayRef<at::Generator> generators)
      : runtime_(runtime), stream_(stream) {
    runtime_.begin_capture(stream_, pool, generators);
  }
  CaptureGuard(const CaptureGuard&) = delete;
  CaptureGuard& operator=(const CaptureGuard&) = delete;
  ~CaptureGuard() {
    if (open_) {
      runtime_.abandon_capture(stream_);
    }
  }
  [[nodiscard]] Graph end() {
    open_ = false;
    return runtime_.end_capture(stream_);
  }

 private:
  Runtime& runtime_;
  c10::Stream stream_;
  bool open_ = true;
};

}  // namespace sidestream
