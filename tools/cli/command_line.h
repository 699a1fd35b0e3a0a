#pragma once

namespace sidestream::cli {

/// All of the program: parses the command line and runs the command. Returns the exit code.
int run_command_line(int argc, char** argv);

}  // namespace sidestream::cli
