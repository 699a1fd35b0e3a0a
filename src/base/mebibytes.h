#pragma once
#include <concepts>
#include <cstdio>
#include <string>
#include <string_view>

namespace sidestream {

/// "1.5 MiB". What rounds to nothing is "0.0 MiB", also if it is negative.
[[nodiscard]] std::string mebibytes(std::integral auto bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
  return std::string_view(text) == "-0.0 MiB" ? text + 1 : text;
}

/// "1.5 MiB (1572864 bytes)", for a number that the reader may have to give back.
[[nodiscard]] std::string exact_mebibytes(std::integral auto bytes) {
  return mebibytes(bytes) + " (" + std::to_string(bytes) + " bytes)";
}

}  // namespace sidestream
