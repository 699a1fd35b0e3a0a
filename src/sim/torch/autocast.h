#pragma once
#include <torch/library.h>

namespace sidestream::sim {

/// Registers autocast for the sim device with the operator lists that LibTorch uses for GPUs: lower precision, fp32, fp32 by
/// dtype argument, promotion. The lower precision is what at::autocast::set_autocast_dtype says for PrivateUse1.
void register_autocast(torch::Library& all, torch::Library& aten);

}  // namespace sidestream::sim
