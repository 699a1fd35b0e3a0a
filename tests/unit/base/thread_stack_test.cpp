#include "base/thread_stack.h"

#include <memory>
#include <thread>

#include <gtest/gtest.h>

namespace sidestream {
namespace {

struct Value {};
using Stack = ThreadStack<Value>;

TEST(ThreadStack, TheLatestThatHasNotEndedIsInForce) {
  Value a, b, c;
  EXPECT_EQ(Stack::top(), nullptr);
  auto first = std::make_unique<Stack::Entry>(&a);
  auto second = std::make_unique<Stack::Entry>(&b);
  auto third = std::make_unique<Stack::Entry>(&c);
  EXPECT_EQ(Stack::top(), &c);
  second.reset();
  EXPECT_EQ(Stack::top(), &c);
  first.reset();
  EXPECT_EQ(Stack::top(), &c);
  first = std::make_unique<Stack::Entry>(&a);
  third.reset();
  EXPECT_EQ(Stack::top(), &a);
  first.reset();
  EXPECT_EQ(Stack::top(), nullptr);
}

TEST(ThreadStack, NullHidesWhatIsBelow) {
  Value a;
  const Stack::Entry entry(&a);
  {
    const Stack::Entry none(nullptr);
    EXPECT_EQ(Stack::top(), nullptr);
  }
  EXPECT_EQ(Stack::top(), &a);
}

TEST(ThreadStack, AnEntryMayEndOnAnotherThread) {
  Value a, b;
  const Stack::Entry entry(&a);
  auto above = std::make_unique<Stack::Entry>(&b);
  std::thread([&] {
    EXPECT_EQ(Stack::top(), nullptr);
    above.reset();
  }).join();
  EXPECT_EQ(Stack::top(), &a);
}

}  // namespace
}  // namespace sidestream
