#pragma once

namespace sidestream::sim {

/// Makes the LibTorch device "sim" (PrivateUse1, one device) known to LibTorch: kernels, allocators, generator, guard, hooks.
/// The first call registers, later ones do nothing; LibTorch cannot take it back. From then on LibTorch regards sim as the
/// process's accelerator: manual_seed, pin_memory and autograd's stream waits mean sim, no longer CUDA.
/// Threads: any.  Throws: UsageError when another PrivateUse1 device is registered in the process.
void register_sim_device();

}  // namespace sidestream::sim
