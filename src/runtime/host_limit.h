#pragma once
#include <cstddef>
#include <optional>
#include <string>

namespace sidestream {

/// Bytes of memory that this process may still take. It is the minimum of what the system has available (MemAvailable) and what remains
/// in each of the process's control groups (version 1 and 2). Pages of files that can be dropped count as free. Not set if the system
/// does not say. `root`: the folder that contains /proc and /sys.
/// Threads: any. Source: proc(5); the kernel's documents on cgroup v1 and v2.
[[nodiscard]] std::optional<std::size_t> host_bytes_left(const std::string& root = "/");

}  // namespace sidestream
