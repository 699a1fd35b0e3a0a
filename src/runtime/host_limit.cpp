#include "runtime/host_limit.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <string>

namespace sidestream {
namespace {

using Bytes = std::optional<std::size_t>;

void limit(Bytes& least, const Bytes& other) {
  if (other) {
    least = least ? std::min(*least, *other) : *other;
  }
}

/// The number in a file of one number; nothing for "max" and for no file.
Bytes number_in(const std::string& file) {
  std::ifstream in(file);
  std::size_t number = 0;
  return in >> number ? Bytes(number) : std::nullopt;
}

/// The number after `key` in a file of lines "key number".
Bytes number_of(const std::string& file, const std::string& key) {
  std::ifstream in(file);
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string name;
    std::size_t number = 0;
    if (words >> name >> number && name == key) {
      return number;
    }
  }
  return std::nullopt;
}

struct Names {
  const char* bound;
  const char* used;
  const char* droppable;  ///< in memory.stat
};

/// What remains under the limits of the groups from `group` up to `top`.
Bytes left_in(const std::string& top, std::string group, const Names& names) {
  Bytes least;
  for (;;) {
    const std::string folder = top + group + "/";
    const Bytes bound = number_in(folder + names.bound);
    const Bytes used = number_in(folder + names.used);
    if (bound && used) {
      const std::size_t droppable = std::min(*used, number_of(folder + "memory.stat", names.droppable).value_or(0));
      const std::size_t kept = *used - droppable;
      limit(least, *bound > kept ? *bound - kept : 0);
    }
    if (group.empty()) {
      return least;
    }
    group.erase(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
  }
}

}  // namespace

std::optional<std::size_t> host_bytes_left(const std::string& root) {
  Bytes least;
  if (const Bytes kibibytes = number_of(root + "/proc/meminfo", "MemAvailable:")) {
    least = *kibibytes * 1024;
  }
  std::ifstream groups(root + "/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {  // "hierarchy:controllers:/path"
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) {
      continue;
    }
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") {
      limit(least, left_in(root + "/sys/fs/cgroup", path, {"memory.max", "memory.current", "inactive_file"}));
    } else if (controllers.find(",memory,") != std::string::npos) {
      limit(least, left_in(root + "/sys/fs/cgroup/memory", path,
                           {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"}));
    }
  }
  return least;
}

}  // namespace sidestream
