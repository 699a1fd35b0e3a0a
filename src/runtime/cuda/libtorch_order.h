#pragma once

namespace sidestream::cuda {

/// Tells ReplayedMemory from here on which streams use it. Once per process: later calls do nothing.
void hear_uses();

/// Tells from here on what LibTorch itself asks of CUDA devices to DeviceListeners. Once per process: later calls do nothing.
/// Where another tracer has LibTorch's seam already (Python's sanitizer), says so on stderr and hears less.
void hear_libtorch();

}  // namespace sidestream::cuda
