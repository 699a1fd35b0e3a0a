#pragma once
#include <c10/core/Event.h>

namespace sidestream::testing_model {

/// `later` waits for what is queued on `earlier`, as a model does it between streams of its own.
inline void order(c10::Stream earlier, c10::Stream later) {
  c10::Event event(earlier.device_type());
  event.record(earlier);
  event.block(later);
}

}  // namespace sidestream::testing_model
