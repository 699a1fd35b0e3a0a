#pragma once
#include "sidestream/detail/export.h"

/// The version of these headers; `sidestream::version()` is that of the library that was loaded.
#define SIDESTREAM_VERSION_MAJOR 0
#define SIDESTREAM_VERSION_MINOR 1
#define SIDESTREAM_VERSION_PATCH 0
#define SIDESTREAM_VERSION "0.1.0"

namespace sidestream {

/// "MAJOR.MINOR.PATCH" of the loaded library. Threads: any. Throws: never.
[[nodiscard]] SIDESTREAM_API const char* version() noexcept;

}  // namespace sidestream
