#include "runtime/numa_node.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <fstream>

namespace sidestream {
namespace {

constexpr int kMaskBits = 1024;
constexpr int kWordBits = 8 * sizeof(unsigned long);
using NodeMask = std::array<unsigned long, kMaskBits / kWordBits>;

}  // namespace

std::optional<int> numa_node_of(std::string bus_id, const std::string& root) {
  std::string online;  // "0", or as "0-1" or "0,2"
  std::ifstream(root + "/sys/devices/system/node/online") >> online;
  if (online.find_first_of("-,") == std::string::npos) {
    return std::nullopt;
  }
  std::transform(bus_id.begin(), bus_id.end(), bus_id.begin(), [](unsigned char c) { return std::tolower(c); });
  int node = -1;
  std::ifstream file(root + "/sys/bus/pci/devices/" + bus_id + "/numa_node");
  return file >> node && node >= 0 && node < kMaskBits ? std::optional(node) : std::nullopt;
}

PreferNode::PreferNode(std::optional<int> node) noexcept {
  int policy = MPOL_DEFAULT;
  if (!node || syscall(SYS_get_mempolicy, &policy, nullptr, 0UL, nullptr, 0UL) != 0 || policy != MPOL_DEFAULT) {
    return;
  }
  NodeMask mask{};
  mask[static_cast<std::size_t>(*node / kWordBits)] = 1UL << (*node % kWordBits);
  // The kernel reads one bit less than it is told.
  set_ = syscall(SYS_set_mempolicy, MPOL_PREFERRED, mask.data(), static_cast<unsigned long>(kMaskBits) + 1) == 0;
}

PreferNode::~PreferNode() {
  if (set_) {
    (void)syscall(SYS_set_mempolicy, MPOL_DEFAULT, nullptr, 0UL);
  }
}

}  // namespace sidestream
