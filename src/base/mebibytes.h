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

/// "1.5 MiB (1572864 bytes)", for a number that the reader may have to give back.
[[nodiscard]] std::string exact_mebibytes(std::integral auto bytes) {
  return mebibytes(bytes) + " (" + std::to_string(bytes) + " bytes)";
}

}  // namespace sidestream
