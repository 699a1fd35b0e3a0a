#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/site.h"
#include "nvtx/injection.h"
#include "threads/at_once.h"

namespace sidestream {
namespace {

const SiteName kUnlabelled;

/// The injection library that NVTX has loaded on its own; nothing here loads it.
class NvtxRanges : public testing::Test {
 protected:
  void SetUp() override {
    { const Site first_call(Activity::sizing, kUnlabelled); }
    const char* path = std::getenv("NVTX_INJECTION64_PATH");
    ASSERT_NE(path, nullptr);
    library_ = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    ASSERT_NE(library_, nullptr) << "NVTX did not load " << path;
    lines_ = find<decltype(&sidestream_nvtx_lines)>("sidestream_nvtx_lines");
    line_ = find<decltype(&sidestream_nvtx_line)>("sidestream_nvtx_line");
    depth_ = find<decltype(&sidestream_nvtx_depth)>("sidestream_nvtx_depth");
    begin_ = lines_();
  }

  void TearDown() override {
    EXPECT_EQ(depth_(), 0u) << "a range stayed open";
    dlclose(library_);
  }

  std::vector<std::string> new_lines() const {
    std::vector<std::string> lines;
    for (std::size_t index = begin_; index < lines_(); ++index) {
      lines.emplace_back(line_(index));
    }
    return lines;
  }

  std::size_t depth() const { return depth_(); }

 private:
  template <typename Function>
  Function find(const char* name) {
    return reinterpret_cast<Function>(dlsym(library_, name));
  }

  void* library_ = nullptr;
  decltype(&sidestream_nvtx_lines) lines_ = nullptr;
  decltype(&sidestream_nvtx_line) line_ = nullptr;
  decltype(&sidestream_nvtx_depth) depth_ = nullptr;
  std::size_t begin_ = 0;
};

TEST_F(NvtxRanges, HaveRegisteredNamesOfKindAndLabel) {
  const SiteName group("blocks.3.core_attn");
  { const Site site(Activity::offload, group); }
  { const Site site(Activity::reload, group); }
  EXPECT_EQ(new_lines(), (std::vector<std::string>{"offload blocks.3.core_attn", "reload blocks.3.core_attn"}));
}

TEST_F(NvtxRanges, Nest) {
  const SiteName call("blocks.0");
  const SiteName group("blocks.0.fc1");
  {
    const Site capture(Activity::capture_forward, call);
    { const Site offload(Activity::offload, group); }
    EXPECT_EQ(depth(), 1u);
    const Site reload(Activity::reload, group);
    EXPECT_EQ(depth(), 2u);
  }
  { const Site launch(Activity::launch_backward, call); }
  EXPECT_EQ(new_lines(), (std::vector<std::string>{"capture forward blocks.0", "  offload blocks.0.fc1",
                                                   "  reload blocks.0.fc1", "launch backward blocks.0"}));
}

TEST_F(NvtxRanges, WithoutALabelCarryTheKind) {
  { const Site site(Activity::warmup, kUnlabelled); }
  EXPECT_EQ(new_lines(), std::vector<std::string>{"warmup"});
}

TEST_F(NvtxRanges, CloseWhenAnExceptionPasses) {
  const auto throwing = [] {
    const SiteName name("blocks.1");
    const Site site(Activity::launch_forward, name);
    throw 1;
  };
  EXPECT_THROW(throwing(), int);
  EXPECT_EQ(depth(), 0u);
}

TEST_F(NvtxRanges, BelongToTheirThread) {
  const Site outer(Activity::sizing, kUnlabelled);
  std::size_t other = 7;
  std::thread([&] {
    const SiteName name("elsewhere");
    const Site site(Activity::offload, name);
    other = depth();
  }).join();
  EXPECT_EQ(other, 1u);
  EXPECT_EQ(new_lines().back(), "offload elsewhere");
}

TEST_F(NvtxRanges, MayBeNamedByManyThreadsAtOnce) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 50;
  test::at_once(kThreads, [](int number) {
    std::vector<SiteName> names;
    for (int i = 0; i < kRounds; ++i) {
      names.emplace_back("layers." + std::to_string(i * (1 + number % 2)));
      // Names that are there already: nothing but the table's own lock orders these with the new ones.
      for (int again = 0; again < 20; ++again) {
        (void)SiteName("layers.0");
      }
    }
    for (const SiteName& name : names) {
      const Site outer(Activity::launch_forward, name);
      const Site inner(Activity::offload, kUnlabelled);
    }
  });
  const std::vector<std::string> lines = new_lines();
  EXPECT_EQ(lines.size(), static_cast<std::size_t>(2 * kThreads * kRounds));
  EXPECT_EQ(std::count(lines.begin(), lines.end(), "  offload"), kThreads * kRounds);
}

}  // namespace
}  // namespace sidestream
