#pragma once
#include <c10/core/AutogradState.h>

namespace sidestream::sim {

/// Backward on the calling thread while it lives.
class OneThreadBackward {
 public:
  OneThreadBackward() : before_(c10::AutogradState::get_tls_state().get_multithreading_enabled()) { set(false); }
  OneThreadBackward(const OneThreadBackward&) = delete;
  OneThreadBackward& operator=(const OneThreadBackward&) = delete;
  ~OneThreadBackward() { set(before_); }

 private:
  static void set(bool enabled) { c10::AutogradState::get_tls_state().set_multithreading_enabled(enabled); }
  bool before_;
};

}  // namespace sidestream::sim
