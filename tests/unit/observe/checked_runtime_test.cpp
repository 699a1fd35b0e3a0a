// What the journal hears of others than the engine: a model's streams and events, operators that copy from and to pinned memory,
// the host, and memory that the allocator hands on.
#include "observe/checked_runtime.h"

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include "sidestream/device.h"
#include "stream_order.h"

namespace sidestream::testing_model {
namespace {

class CheckedRuntimeTest : public testing::Test {
 protected:
  void SetUp() override {
    checked_->begin_step(1);
    observing_.emplace([this](const OperatorAccess& access) { checked_->observe(access); });
  }
  void TearDown() override {
    observing_.reset();
    synchronize(device_);
  }
  [[nodiscard]] c10::Stream a() const { return a_.get(); }
  [[nodiscard]] c10::Stream b() const { return b_.get(); }
  [[nodiscard]] at::TensorOptions options() const { return at::TensorOptions().device(device_).dtype(at::kFloat); }
  static at::Tensor pinned(std::int64_t count) { return at::ones({count}).pin_memory(); }
  template <class Body>
  static at::Tensor on(c10::Stream stream, const Body& body) {
    const c10::StreamGuard guard(stream);
    return body();
  }
  /// Frees `x` and gives its memory to a new tensor on stream `a`.
  void reuse(at::Tensor& x) {
    const void* address = x.data_ptr();
    x.reset();
    x = on(a(), [&] { return at::zeros({64}, options()); });
    ASSERT_EQ(x.data_ptr(), address);
  }
  void expect_clean() { EXPECT_EQ(checked_->findings(), std::vector<std::string>()); }
  /// Exactly one finding, which has each of these words.
  void expect_one(const std::vector<std::string>& words) {
    const std::vector<std::string> found = checked_->findings();
    ASSERT_EQ(found.size(), 1U) << (found.empty() ? std::string() : found[0] + "\n" + found.back());
    for (const std::string& word : words) {
      EXPECT_NE(found[0].find(word), std::string::npos) << "\"" << word << "\" is not in: " << found[0];
    }
  }

  c10::Device device_{c10::DeviceType::PrivateUse1, 0};
  std::shared_ptr<Runtime> runtime_ = make_runtime(device_);
  std::shared_ptr<CheckedRuntime> checked_ = std::make_shared<CheckedRuntime>(runtime_);
  OwnedStream a_ = checked_->create_stream();
  OwnedStream b_ = checked_->create_stream();
  std::optional<OperatorObserverGuard> observing_;
};

TEST_F(CheckedRuntimeTest, AForgottenForkIsFound) {
  const at::Tensor x = on(a(), [&] { return at::ones({64}, options()); });
  const at::Tensor y = on(b(), [&] { return x.exp(); });
  expect_one({"aten::ones on stream", "aten::exp on stream", "(step 1)", "+256 bytes", "must wait for an event that"});
}

TEST_F(CheckedRuntimeTest, TheEnginesOwnEventsAreWrittenOnce) {
  const Event event = checked_->create_event(EventTiming::off);
  const std::uint64_t before = checked_->operations();
  checked_->record(event, a());
  checked_->wait(b(), event);
  EXPECT_EQ(checked_->operations(), before + 2);
}

TEST_F(CheckedRuntimeTest, AnEventOfBeforeTheJournalIsNoMissingRecord) {
  checked_.reset();
  c10::Event event(device_.type());
  event.record(a());
  checked_ = std::make_shared<CheckedRuntime>(runtime_);
  event.block(b());
  expect_clean();
}

TEST_F(CheckedRuntimeTest, WhatAnotherThreadHasSeenIsNot) {
  const at::Tensor x = on(a(), [&] { return at::ones({64}, options()); });
  std::thread([&] { a().synchronize(); }).join();
  const at::Tensor y = on(b(), [&] { return x.exp(); });
  expect_one({"aten::exp"});
}

// The caching allocator of pinned memory looks whether the copies of a freed block are done before it lends it again.
TEST_F(CheckedRuntimeTest, FreedPinnedMemoryIsLentBehindItsCopies) {
  at::Tensor x;
  const void* address = nullptr;
  bool again = false;
  for (int i = 0; i < 8; ++i) {
    at::Tensor batch = pinned(1024);
    again = again || batch.data_ptr() == address;
    address = batch.data_ptr();
    x = on(i % 2 == 0 ? a() : b(), [&] { return batch.to(device_, true); });
  }
  EXPECT_TRUE(again);
  expect_clean();
}

TEST_F(CheckedRuntimeTest, RecordStreamMakesItFine) {
  at::Tensor x = on(a(), [&] { return at::ones({64}, options()); });
  order(a(), b());
  const at::Tensor y = on(b(), [&] { return x.exp(); });
  x.record_stream(b());
  const at::Tensor z = on(b(), [&] { return x.tanh(); });  // after record_stream, and before the free
  ASSERT_NO_FATAL_FAILURE(reuse(x));
  expect_clean();
}

TEST_F(CheckedRuntimeTest, RecordStreamCoversWhatThatStreamHasWaitedFor) {
  const OwnedStream c = checked_->create_stream();
  at::Tensor x = on(a(), [&] { return at::ones({64}, options()); });
  order(a(), c);
  const at::Tensor y = on(c, [&] { return x.exp(); });
  order(c, b());
  const at::Tensor z = on(b(), [&] { return y.tanh(); });
  x.record_stream(b());
  ASSERT_NO_FATAL_FAILURE(reuse(x));
  expect_clean();
}

TEST_F(CheckedRuntimeTest, RecordStreamOfOneStreamIsNoneOfAnother) {
  const OwnedStream c = checked_->create_stream();
  at::Tensor x = on(a(), [&] { return at::ones({64}, options()); });
  order(a(), b());
  order(a(), c);
  const at::Tensor y = on(b(), [&] { return x.exp(); });
  const at::Tensor z = on(c, [&] { return x.tanh(); });
  x.record_stream(b());
  ASSERT_NO_FATAL_FAILURE(reuse(x));
  expect_one({"aten::tanh", "aten::empty"});
}

TEST_F(CheckedRuntimeTest, RecordStreamOrdersNothingElse) {
  at::Tensor x = on(a(), [&] { return at::ones({64}, options()); });
  order(a(), b());
  const at::Tensor y = on(b(), [&] { return x.exp(); });
  x.record_stream(b());
  x.reset();
  x = on(a(), [&] { return y.tanh(); });
  expect_one({"aten::exp", "aten::tanh"});
}

TEST_F(CheckedRuntimeTest, AChangeOfShapeTouchesNoBytes) {
  at::Tensor x = on(a(), [&] { return at::ones({64}, options()); });
  (void)on(b(), [&] { return x.unsqueeze_(0).t_().detach_(); });
  x.set_requires_grad(true);
  expect_clean();
}

TEST_F(CheckedRuntimeTest, WhatSchemasHideIsWritten) {
  const at::Tensor x = on(a(), [&] { return at::ones({4, 8}, options()); });
  const at::Tensor mean = on(a(), [&] { return at::zeros({8}, options()); });
  const at::Tensor variance = on(a(), [&] { return at::ones({8}, options()); });
  (void)on(a(), [&] { return at::batch_norm(x, {}, {}, mean, variance, /*training=*/true, 0.1, 1e-5, false); });
  const at::Tensor before = on(b(), [&] { return mean.exp(); });
  ASSERT_FALSE(checked_->findings().empty());
  EXPECT_NE(checked_->findings()[0].find("batch_norm"), std::string::npos) << checked_->findings()[0];
}

class CheckedCaptureTest : public CheckedRuntimeTest {
 protected:
  /// Launches twice what `body` does on `a`, from which it may fork to `b`.
  template <class Body>
  void launch_twice(const Body& body) {
    const MemoryPool pool = checked_->create_pool();
    checked_->begin_capture(a(), pool, {});
    at::Tensor kept = on(a(), body);
    const Graph graph = checked_->end_capture(a());
    checked_->launch(graph, a());
    checked_->launch(graph, a());
    synchronize(device_);
  }
};

TEST_F(CheckedCaptureTest, ARaceInAForkIsFoundAtTheLaunch) {
  const at::Tensor x = on(a(), [&] { return at::ones({64}, options()); });
  launch_twice([&] {
    order(a(), b());
    const at::Tensor y = on(b(), [&] { return x.exp(); });
    x.add_(1);
    order(b(), a());
    return y + x;
  });
  expect_one({"aten::exp on fork 1 of graph 1", "reads", "aten::add_", "writes"});
}

// What the first graph has freed is the second's memory: nothing but events orders their launches on two streams.
TEST_F(CheckedCaptureTest, GraphsOfOnePoolShareItsMemory) {
  const at::Tensor x = on(a(), [&] { return at::ones({64}, options()); });
  synchronize(device_);
  const MemoryPool pool = checked_->create_pool();
  const auto capture = [&](const auto& body) {
    checked_->begin_capture(a(), pool, {});
    (void)on(a(), body);
    return checked_->end_capture(a());
  };
  const Graph first = capture([&] { return x.exp(); });
  const Graph second = capture([&] { return x.tanh(); });
  checked_->begin_step(2);
  checked_->launch(first, a());
  order(a(), b());
  checked_->launch(second, b());
  order(b(), a());
  checked_->begin_step(3);
  checked_->launch(first, a());
  expect_clean();
  checked_->launch(second, b());
  expect_one({"aten::exp on stream 1 (step 3) writes", "aten::tanh on stream ", "(step 3) writes them"});
  synchronize(device_);
}

}  // namespace
}  // namespace sidestream::testing_model
