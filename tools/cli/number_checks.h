#pragma once

namespace CLI {
class App;
}

namespace sidestream::cli {

/// Lets parsing refuse empty numbers, and integers beyond 64 bits, for all options of `command`. CLI11 reads them as 0 and as the nearest
/// integer.
void check_numbers(CLI::App& command);

}  // namespace sidestream::cli
