#pragma once

namespace sidestream::cli {

/// `sidestream info`: versions, devices and the measured speed of the link to each, on stdout. Returns the exit code.
[[nodiscard]] int info();

}  // namespace sidestream::cli
