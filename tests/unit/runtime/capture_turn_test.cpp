#include "runtime/capture_turn.h"

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include <gtest/gtest.h>

#include "sidestream/error.h"
#include "threads/at_once.h"

namespace sidestream {
namespace {

const c10::Device first(c10::DeviceType::CUDA, 0);
const c10::Device second(c10::DeviceType::CUDA, 1);

/// What `work` throws on a thread of its own; empty: nothing.
template <class Work>
std::string thrown_on_a_thread(const Work& work) {
  std::string message;
  std::thread([&] {
    try {
      work();
    } catch (const UsageError& error) {
      message = error.what();
    }
  }).join();
  return message;
}

TEST(CaptureTurn, OneThreadHasItAtATime) {
  int captures = 0;  // guarded by nothing but the turn
  test::at_once(4, [&](int /*number*/) {
    for (int i = 0; i < 200; ++i) {
      const CaptureTurn turn(first);
      ++captures;
    }
  });
  EXPECT_EQ(captures, 800);
}

TEST(CaptureTurn, NestsOnItsThread) {
  const CaptureTurn turn(first);
  {
    const CaptureTurn nested(first);
    EXPECT_TRUE(CaptureTurn::mine(first));
  }
  EXPECT_TRUE(CaptureTurn::mine(first));
  EXPECT_FALSE(CaptureTurn::mine(second));
  EXPECT_EQ(thrown_on_a_thread([] { EXPECT_FALSE(CaptureTurn::mine(first)); }), "");
}

TEST(CaptureTurn, DevicesHaveTurnsOfTheirOwn) {
  const CaptureTurn turn(first);
  EXPECT_EQ(thrown_on_a_thread([] {
              const CaptureTurn other(second);
              EXPECT_TRUE(CaptureTurn::let_others_finish(second));
            }),
            "");
}

TEST(CaptureTurn, AThreadWithATurnWaitsForNoOtherDevices) {
  const CaptureTurn turn(first);
  const std::string message = thrown_on_a_thread([] {
    const CaptureTurn own(second);
    EXPECT_FALSE(CaptureTurn::let_others_finish(first));
    const CaptureTurn other(first);
  });
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "capture one engine after the other", message);
}

TEST(CaptureTurn, OthersAreLetFinish) {
  int written = 0;  // guarded by nothing but the turn
  std::atomic<bool> begun{false};
  std::thread capturing([&] {
    const CaptureTurn turn(first);
    begun.store(true);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    written = 1;
  });
  while (!begun.load()) {
    std::this_thread::yield();
  }
  CaptureTurn::let_others_finish(first, "a test");
  EXPECT_EQ(written, 1);
  capturing.join();
}

TEST(CaptureTurn, TheOwnCaptureIsNotWaitedFor) {
  const CaptureTurn turn(first);
  EXPECT_TRUE(CaptureTurn::let_others_finish(first));
}

}  // namespace
}  // namespace sidestream
