#include "runtime/numa_node.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>

#include <gtest/gtest.h>

namespace sidestream {
namespace {

/// The calling thread's memory policy, -1 if the system does not say.
int policy() {
  int value = -1;
  return syscall(SYS_get_mempolicy, &value, nullptr, 0UL, nullptr, 0UL) == 0 ? value : -1;
}

class NumaNode : public testing::Test {
 protected:
  NumaNode() : root_(std::filesystem::path(testing::TempDir()) / ("numa_node_" + std::to_string(getpid()))) {}
  // Not std::filesystem::remove_all: LibTorch exports its own copy of it, which wins at link time and crashes.
  void TearDown() override {
    for (std::filesystem::path path : written_) {
      for (; path != root_.parent_path(); path = path.parent_path()) {
        std::remove(path.c_str());
      }
    }
  }
  void write(const std::string& file, const std::string& text) {
    const std::filesystem::path path = root_ / file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text << '\n';
    written_.insert(path);
  }
  [[nodiscard]] std::optional<int> node() const { return numa_node_of("0000:1B:00.0", root_.string()); }

  const std::filesystem::path root_;
  std::set<std::filesystem::path> written_;
};

TEST_F(NumaNode, IsThatOfTheDeviceIfThereAreSeveral) {
  EXPECT_EQ(node(), std::nullopt) << "the system says nothing";
  write("sys/bus/pci/devices/0000:1b:00.0/numa_node", "1");
  for (const char* online : {"0-1", "0,2", "0-3,8"}) {
    write("sys/devices/system/node/online", online);
    EXPECT_EQ(node(), 1) << online;
  }
  write("sys/devices/system/node/online", "0");
  EXPECT_EQ(node(), std::nullopt) << "one node: nothing is asked";
  write("sys/devices/system/node/online", "0-1");
  for (const char* none : {"-1", "", "many", "1024"}) {
    write("sys/bus/pci/devices/0000:1b:00.0/numa_node", none);
    EXPECT_EQ(node(), std::nullopt) << none;
  }
}

TEST_F(NumaNode, IsPreferredAsLongAsTheObjectLives) {
  if (policy() != MPOL_DEFAULT) {
    GTEST_SKIP() << "this process has a memory policy, or may not ask for it";
  }
  {
    const PreferNode none(std::nullopt);
    EXPECT_EQ(policy(), MPOL_DEFAULT);
    const PreferNode not_there(1023);
    EXPECT_EQ(policy(), MPOL_DEFAULT) << "a system that refuses is no error";
  }
  {
    const PreferNode first(0);
    EXPECT_EQ(policy(), MPOL_PREFERRED);
    { const PreferNode second(0); }
    EXPECT_EQ(policy(), MPOL_PREFERRED) << "a policy that was set before stays";
  }
  EXPECT_EQ(policy(), MPOL_DEFAULT);
}

}  // namespace
}  // namespace sidestream
