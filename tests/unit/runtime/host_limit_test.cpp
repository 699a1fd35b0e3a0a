#include "runtime/host_limit.h"

#include <sys/stat.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include <gtest/gtest.h>

namespace sidestream {
namespace {

/// A system's files, below a folder that ends with the test.
class HostLimitTest : public testing::Test {
 protected:
  void SetUp() override {
    root_ = testing::TempDir() + "/host_limit_XXXXXX";
    ASSERT_NE(mkdtemp(root_.data()), nullptr);
  }
  void TearDown() override { EXPECT_EQ(std::system(("rm -r '" + root_ + "'").c_str()), 0); }
  void write(const std::string& file, const std::string& text) const {
    for (std::size_t slash = file.find('/'); slash != std::string::npos; slash = file.find('/', slash + 1)) {
      (void)mkdir((root_ + "/" + file.substr(0, slash)).c_str(), 0777);
    }
    std::ofstream(root_ + "/" + file) << text;
  }
  void write_available(std::size_t kibibytes) const {
    write("proc/meminfo", "MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable: " + std::to_string(kibibytes) + " kB\n");
  }

  std::string root_;
};

TEST_F(HostLimitTest, WithoutAWordOfTheSystemThereIsNone) { EXPECT_FALSE(host_bytes_left(root_)); }

TEST_F(HostLimitTest, WithoutGroupsItIsWhatTheSystemHas) {
  write_available(4096);
  EXPECT_EQ(host_bytes_left(root_), std::size_t{4} << 20);
}

TEST_F(HostLimitTest, AGroupLeavesItsBoundLessWhatItKeeps) {
  write_available(4096);
  write("proc/self/cgroup", "0::/job\n");
  write("sys/fs/cgroup/job/memory.max", "3000000\n");
  write("sys/fs/cgroup/job/memory.current", "1500000\n");
  EXPECT_EQ(host_bytes_left(root_), 1500000U);
  write("sys/fs/cgroup/job/memory.stat", "anon 1\ninactive_file 500000\nactive_file 7\n");
  EXPECT_EQ(host_bytes_left(root_), 2000000U) << "pages of files can be dropped";
}

TEST_F(HostLimitTest, EachGroupAboveCountsAndMaxIsNoBound) {
  write_available(4096);
  write("proc/self/cgroup", "0::/jobs/one\n");
  write("sys/fs/cgroup/jobs/one/memory.max", "max\n");
  write("sys/fs/cgroup/jobs/one/memory.current", "100\n");
  EXPECT_EQ(host_bytes_left(root_), std::size_t{4} << 20);
  write("sys/fs/cgroup/jobs/memory.max", "900000\n");
  write("sys/fs/cgroup/jobs/memory.current", "1000000\n");
  EXPECT_EQ(host_bytes_left(root_), 0U) << "over its bound";
}

TEST_F(HostLimitTest, GroupsOfTheFirstVersionToo) {
  write_available(4096);
  write("proc/self/cgroup", "9:cpu,cpuacct:/x\n5:memory:/y\n");
  write("sys/fs/cgroup/memory/y/memory.limit_in_bytes", "9223372036854771712\n");
  write("sys/fs/cgroup/memory/y/memory.usage_in_bytes", "1000\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "2000000\n");
  write("sys/fs/cgroup/memory/memory.usage_in_bytes", "500000\n");
  EXPECT_EQ(host_bytes_left(root_), 1500000U);
}

TEST_F(HostLimitTest, ThisHostHasSome) {
  if (std::ifstream("/proc/meminfo")) {
    EXPECT_GT(host_bytes_left().value_or(0), 0U);
  }
}

}  // namespace
}  // namespace sidestream
