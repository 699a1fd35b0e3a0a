#include "tools/cli/command_line.h"

int main(int argc, char** argv) { return sidestream::cli::run_command_line(argc, argv); }
