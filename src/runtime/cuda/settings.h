#pragma once
#include <cstddef>
#include <limits>
#include <string>

namespace sidestream::cuda {

/// What LibTorch was told about its CUDA memory, by environment and program.
struct Settings {
  std::string allocator = "native";  ///< its name
  bool caching = true;
  std::size_t max_split_bytes = std::numeric_limits<std::size_t>::max();
  double garbage_collection_threshold = 0.0;
};

/// Those of this process.
[[nodiscard]] Settings current_settings();

/// Throws: UsageError if `settings` rule out an engine, or, with `graphs`, graphs that share their memory. It names the setting and
/// what to set instead.
void check_settings(const Settings& settings, bool graphs);

}  // namespace sidestream::cuda
