#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "graphs/sequence/captured_call.h"

namespace sidestream {

/// A copy of `input`, a call's argument, for the capture to come: on the host where it lies on `device`, since calls that wait for
/// their capture would hold much of the device else. Waits for the copy. Throws: what the copy throws.
[[nodiscard]] CallInput sample_of(const at::Tensor& input, c10::Device device);
/// The sample of `input`, on `device` again if it left for the host; else itself.
[[nodiscard]] at::Tensor sample_on(c10::Device device, const CallInput& input);

}  // namespace sidestream
