#pragma once
#include <c10/core/Device.h>

namespace sidestream {

/// Waits until autograd's device thread has freed the last tensors of the backward passes that have returned. The thread does so shortly
/// after the pass returns, and before it begins another one; so a small pass is run here. Returns at once if autograd's multithreading
/// is switched off, because the calling thread runs backwards then.
/// Capture: illegal.
void await_end_of_backward(c10::Device device);

}  // namespace sidestream
