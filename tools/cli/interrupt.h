#pragma once

namespace sidestream::cli {

/// While it lives, the first Ctrl-C, SIGTERM or SIGHUP is only noted, with a line on stderr, so that the running step can end;
/// after that a Ctrl-C or SIGTERM ends the process at once. A further SIGHUP does not: a terminal that closes sends several.
/// A signal that was ignored before (nohup) stays ignored.
/// One at a time: the signal table of the process is what it changes, and puts back.
class [[nodiscard]] InterruptGuard {
 public:
  InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;
  ~InterruptGuard();

  /// The signal that asked for the end; 0 before it came.
  [[nodiscard]] int signal() const noexcept;
  [[nodiscard]] bool requested() const noexcept { return signal() != 0; }
};

/// "Ctrl-C", "SIGTERM" or "SIGHUP".
[[nodiscard]] const char* signal_words(int signal) noexcept;

/// While it lives, a signal that ends the process at once under an InterruptGuard removes this file first.
/// One at a time; `path` must outlive it.
class [[nodiscard]] RemovedBySignal {
 public:
  explicit RemovedBySignal(const char* path) noexcept;
  RemovedBySignal(const RemovedBySignal&) = delete;
  RemovedBySignal& operator=(const RemovedBySignal&) = delete;
  ~RemovedBySignal();
};

}  // namespace sidestream::cli
