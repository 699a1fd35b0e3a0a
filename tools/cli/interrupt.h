#pragma once

namespace sidestream::cli {

/// While it lives, the first Ctrl-C only sets a flag, so that the running step can end; the second ends the process at once.
/// One at a time: the signal table of the process is what it changes, and puts back.
class [[nodiscard]] InterruptGuard {
 public:
  InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;
  ~InterruptGuard();

  /// True after the first Ctrl-C.
  [[nodiscard]] bool requested() const noexcept;
};

}  // namespace sidestream::cli
