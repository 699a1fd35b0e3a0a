#pragma once
#include <cstddef>
#include <optional>
#include <string>

namespace sidestream {

/// Bytes of memory that this process may still take: the least of what the system has available (MemAvailable) and what each of
/// the control groups that it is in (version 1 and 2) leaves, pages of files that can be dropped counted as free. Nothing where
/// the system does not say. `root`: under which /proc and /sys are looked for.
/// Threads: any. Source: proc(5); the kernel's documents on cgroup v1 and v2.
[[nodiscard]] std::optional<std::size_t> host_bytes_left(const std::string& root = "/");

}  // namespace sidestream
