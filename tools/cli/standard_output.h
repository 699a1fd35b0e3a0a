#pragma once
#include <cstdio>
#include <string>

namespace sidestream::cli {

/// Writes `text` to standard output at once, so that who reads a pipe sees it when it is said.
inline void print(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

}  // namespace sidestream::cli
