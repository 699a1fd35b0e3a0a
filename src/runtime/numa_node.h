#pragma once
#include <optional>
#include <string>

namespace sidestream {

/// The NUMA node of the PCI device `bus_id` ("0000:1B:00.0"). Not set if the system has one node only, or names none.
/// `root`: the folder in place of "/", for tests. Threads: any.
[[nodiscard]] std::optional<int> numa_node_of(std::string bus_id, const std::string& root = "");

/// While it lives, new pages of the calling thread lie on `node`, if there is room. So do those of threads that it starts meanwhile.
/// If the process was started with a memory policy (numactl), that policy stays. A system that refuses is no error.
class [[nodiscard]] PreferNode {
 public:
  explicit PreferNode(std::optional<int> node) noexcept;
  PreferNode(const PreferNode&) = delete;
  PreferNode& operator=(const PreferNode&) = delete;
  ~PreferNode();

 private:
  bool set_ = false;
};

}  // namespace sidestream
