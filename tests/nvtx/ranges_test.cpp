#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/tracing.h"
#include "nvtx/injection.h"
#include "threads/at_once.h"

namespace sidestream::tracing {
namespace {

/// The injection library that NVTX has loaded on its own; nothing here loads it.
class NvtxRanges : public testing::Test {
 protected:
  void SetUp() override {
    { const Scope first_call(Range::sizing, Name()); }
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
  const Name group("blocks.3.core_attn");
  { const Scope scope(Range::offload, group); }
  { const Scope scope(Range::reload, group); }
  EXPECT_EQ(new_lines(), (std::vector<std::string>{"offload blocks.3.core_attn", "reload blocks.3.core_attn"}));
}

TEST_F(NvtxRanges, Nest) {
  const Name call("blocks.0");
  const Name group("blocks.0.fc1");
  {
    const Scope capture(Range::capture_forward, call);
    { const Scope offload(Range::offload, group); }
    EXPECT_EQ(depth(), 1u);
    const Scope reload(Range::reload, group);
    EXPECT_EQ(depth(), 2u);
  }
  { const Scope launch(Range::launch_backward, call); }
  EXPECT_EQ(new_lines(), (std::vector<std::string>{"capture forward blocks.0", "  offload blocks.0.fc1",
                                                   "  reload blocks.0.fc1", "launch backward blocks.0"}));
}

TEST_F(NvtxRanges, WithoutALabelCarryTheKind) {
  { const Scope scope(Range::warmup, Name()); }
  EXPECT_EQ(new_lines(), std::vector<std::string>{"warmup"});
}

TEST_F(NvtxRanges, CloseWhenAnExceptionPasses) {
  const auto throwing = [] {
    const Scope scope(Range::launch_forward, Name("blocks.1"));
    throw 1;
  };
  EXPECT_THROW(throwing(), int);
  EXPECT_EQ(depth(), 0u);
}

TEST_F(NvtxRanges, BelongToTheirThread) {
  const Scope outer(Range::sizing, Name());
  std::size_t other = 7;
  std::thread([&] {
    const Scope scope(Range::offload, Name("elsewhere"));
    other = depth();
  }).join();
  EXPECT_EQ(other, 1u);
  EXPECT_EQ(new_lines().back(), "offload elsewhere");
}

TEST_F(NvtxRanges, MayBeNamedByManyThreadsAtOnce) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 50;
  test::at_once(kThreads, [](int number) {
    std::vector<Name> names;
    for (int i = 0; i < kRounds; ++i) {
      names.emplace_back(("layers." + std::to_string(i * (1 + number % 2))).c_str());
      // Names that are there already: nothing but the table's own lock orders these with the new ones.
      for (int again = 0; again < 20; ++again) {
        (void)Name("layers.0");
      }
    }
    for (const Name& name : names) {
      const Scope outer(Range::launch_forward, name);
      const Scope inner(Range::offload, Name());
    }
  });
  const std::vector<std::string> lines = new_lines();
  EXPECT_EQ(lines.size(), static_cast<std::size_t>(2 * kThreads * kRounds));
  EXPECT_EQ(std::count(lines.begin(), lines.end(), "  offload"), kThreads * kRounds);
}

}  // namespace
}  // namespace sidestream::tracing
