#pragma once
#include <c10/core/Device.h>

namespace sidestream {

/// Waits until autograd's device thread has freed the last tensors of a backward pass. The thread does so a moment after the pass has
/// returned, but before it begins another pass. Returns at once if the calling thread runs backwards itself (multithreading of autograd
/// switched off).
/// Capture: illegal.
void await_end_of_backward(c10::Device device);

}  // namespace sidestream
