#pragma once
#include "sidestream/detail/export.h"

// The version of these headers. `sidestream::version()` gives the version of the library that is loaded.
// Before 1.0 a minor version may break source and binary compatibility. A patch version breaks neither.
#define SIDESTREAM_VERSION_MAJOR 0
#define SIDESTREAM_VERSION_MINOR 2
#define SIDESTREAM_VERSION_PATCH 0
#define SIDESTREAM_VERSION "0.2.0"

/// Offload of saved tensors and CUDA graphs for trainers on LibTorch. In examples the namespace is named `ss`.
namespace sidestream {

/// The version of the loaded library, as "MAJOR.MINOR.PATCH". The macro `SIDESTREAM_VERSION` is the version of the headers.
/// Threads: any.  Throws: never.
[[nodiscard]] SIDESTREAM_API const char* version() noexcept;

}  // namespace sidestream
