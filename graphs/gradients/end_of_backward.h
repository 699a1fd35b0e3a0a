#pragma once
#include <c10/core/Device.h>

namespace sidestream {

/// Autograd's device thread lets go of the last tensors of a backward pass a moment after it has returned, but before it begins another:
/// returns behind that. At once where the calling thread runs backwards itself (multithreading of autograd switched off).
/// Capture: illegal.
void await_end_of_backward(c10::Device device);

}  // namespace sidestream
