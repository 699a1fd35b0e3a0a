#pragma once
#include <vector>

#include <ATen/core/Tensor.h>

#include "graphs/sequence/captured_call.h"

namespace sidestream {

/// In the capture of its backward: the gradient of an owned parameter stays where the graph leaves it, for as long as the graph lives.
void give_memory(CallParameter& parameter);

/// Behind the capture of the last backward in memory that is the sequence's own: no graph to come could use the memory of `grads`, what it
/// leaves of its inputs' gradients (owning, and nobody else's but autograd's). Those that lie by themselves may be given out as they
/// are, where a clone would take as much again of the device.
void give_input_gradients(CapturedCall& call, const std::vector<at::Tensor>& grads);

}  // namespace sidestream
