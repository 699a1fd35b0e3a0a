#include "graphs/capture/autocast_state.h"

#include <ATen/autocast_mode.h>

namespace sidestream {

AutocastState AutocastState::current(c10::DeviceType type) {
  AutocastState state;
  state.type = type;
  state.enabled = at::autocast::is_autocast_enabled(type);
  if (state.enabled) {
    state.dtype = at::autocast::get_autocast_dtype(type);
  }
  return state;
}

void AutocastGuard::set(const AutocastState& state) {
  at::autocast::set_autocast_enabled(state.type, state.enabled);
  if (state.enabled) {
    at::autocast::set_autocast_dtype(state.type, state.dtype);
  }
}

AutocastGuard::AutocastGuard(const AutocastState& state) : before_(AutocastState::current(state.type)) {
  at::autocast::clear_cache();
  set(state);
  at::autocast::increment_nesting();
}

AutocastGuard::~AutocastGuard() {
  at::autocast::decrement_nesting();
  set(before_);
  at::autocast::clear_cache();
}

}  // namespace sidestream
