#pragma once
#include "sidestream/detail/export.h"

// The version of these headers. `sidestream::version()` gives the version of the library that is loaded.
#define SIDESTREAM_VERSION_MAJOR 0
#define SIDESTREAM_VERSION_MINOR 1
#define SIDESTREAM_VERSION_PATCH 0
#define SIDESTREAM_VERSION "0.1.0"

namespace sidestream {

/// The version of the loaded library, as "MAJOR.MINOR.PATCH". The macro `SIDESTREAM_VERSION` is the version of the headers.
/// Threads: any.  Throws: never.
[[nodiscard]] SIDESTREAM_API const char* version() noexcept;

}  // namespace sidestream
