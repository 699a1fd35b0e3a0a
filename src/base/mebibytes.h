#pragma once
#include <concepts>
#include <cstdio>
#include <string>

namespace sidestream {

/// "1.5 MiB".
[[nodiscard]] std::string mebibytes(std::integral auto bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

}  // namespace sidestream
