#pragma once
#include <torch/library.h>

namespace sidestream::sim {

/// Registers kernels that LibTorch routes elsewhere on a device of its own: fused attention with its choice of backend,
/// convolution and dropout. Each computes what the CPU's path computes, bit for bit. Called once, by register_sim_device.
void register_attention(torch::Library& aten);
void register_convolution(torch::Library& aten);
void register_dropout(torch::Library& aten);
/// Of recurrent networks (LSTM, GRU, RNN) and their cells. These are composed of other operators, so that autograd sees those:
/// called once for the device's key and once for its autograd key.
void register_recurrent(torch::Library& library);

}  // namespace sidestream::sim
