#pragma once

namespace CLI {
class App;
}

namespace sidestream::cli {

/// Lets parsing refuse values of all options of `command` that CLI11 takes for others: empty numbers (0), integers beyond 64 bits (the
/// nearest one), octal and hexadecimal ones, and empty names of files (no file).
void check_values(CLI::App& command);

}  // namespace sidestream::cli
