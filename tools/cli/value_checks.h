#pragma once

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace sidestream::cli {

/// Lets parsing refuse values of all options of `command` that CLI11 takes for others: empty numbers (0), integers beyond 64 bits (the
/// nearest one), octal and hexadecimal ones, and empty names of files (no file).
void check_values(CLI::App& command);

/// Lets parsing refuse numbers for `option` that are not within `least` and `most`.
void require_range(CLI::Option& option, double least, double most);

}  // namespace sidestream::cli
