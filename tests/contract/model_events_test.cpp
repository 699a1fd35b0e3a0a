// What the journal hears of a model's own streams and events: it misses no order of a correct model, and finds what a model forgets.
#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "contract/fixture.h"
#include "observe/checked_runtime.h"
#include "stream_order.h"

namespace sidestream::contract {
namespace {

using testing_model::order;

/// On streams of LibTorch's pool. On a GPU their ids are not the driver's handles.
class ModelEventsContract : public RuntimeContract {
 protected:
  void SetUp() override {
    RuntimeContract::SetUp();
    if (IsSkipped()) {
      return;
    }
    checked().begin_step(1);
    observing_.emplace([this](const OperatorAccess& access) { checked().observe(access); });
    const c10::impl::VirtualGuardImpl streams(GetParam().type);
    a_.emplace(streams.getStreamFromGlobalPool(runtime().device()));
    b_.emplace(streams.getStreamFromGlobalPool(runtime().device()));
  }
  void TearDown() override {
    observing_.reset();
    RuntimeContract::TearDown();
  }
  [[nodiscard]] CheckedRuntime& checked() const { return dynamic_cast<CheckedRuntime&>(runtime()); }
  template <class Body>
  static at::Tensor on(c10::Stream stream, const Body& body) {
    const c10::StreamGuard guard(stream);
    return body();
  }
  [[nodiscard]] at::Tensor ones_on_a() const {
    return on(a(), [&] { return at::ones({1024}, options()); });
  }
  [[nodiscard]] c10::Stream a() const { return *a_; }
  [[nodiscard]] c10::Stream b() const { return *b_; }
  /// Waits past the journal.
  static void drain(c10::Stream stream) { runtime_of(GetParam().type)->synchronize(stream); }
  void expect_clean() { EXPECT_EQ(checked().findings(), std::vector<std::string>()); }
  /// Each of these words is in the first finding. On the simulated device it is the only one.
  void expect_found(const std::vector<std::string>& words) {
    const std::vector<std::string> found = checked().findings();
    ASSERT_FALSE(found.empty());
    EXPECT_TRUE(on_gpu() || found.size() == 1) << found.back();
    for (const std::string& word : words) {
      EXPECT_PRED_FORMAT2(testing::IsSubstring, word, found[0]);
    }
  }

 private:
  std::optional<OperatorObserverGuard> observing_;
  std::optional<c10::Stream> a_;
  std::optional<c10::Stream> b_;
};

TEST_P(ModelEventsContract, AForkAndAJoinAreSeen) {
  const at::Tensor x = ones_on_a();
  order(a(), b());
  const at::Tensor y = on(b(), [&] { return x.exp(); });
  order(b(), a());
  const at::Tensor z = on(a(), [&] { return x + y; });
  expect_clean();
}

TEST_P(ModelEventsContract, AForgottenJoinIsFound) {
  const at::Tensor x = ones_on_a();
  order(a(), b());
  const at::Tensor y = on(b(), [&] { return x.exp(); });
  const at::Tensor z = on(a(), [&] { return x + y; });
  expect_found({"aten::exp", "writes", "aten::add", "reads"});
}

TEST_P(ModelEventsContract, TheDefaultStreamIsOneStream) {
  const c10::Stream main = c10::impl::VirtualGuardImpl(GetParam().type).getDefaultStream(runtime().device());
  const at::Tensor x = on(main, [&] { return at::ones({1024}, options()); });
  order(main, b());
  const at::Tensor y = on(b(), [&] { return x.exp(); });
  order(b(), main);
  const at::Tensor z = on(main, [&] { return x + y; });
  expect_clean();
}

TEST_P(ModelEventsContract, BackwardOverTwoStreamsIsOrderedByAutograd) {
  const at::Tensor leaf = ones_on_a().requires_grad_(true);
  const at::Tensor x = on(a(), [&] { return leaf.mul(2); });
  order(a(), b());
  for (int i = 0; i < 4; ++i) {
    const at::Tensor z = on(a(), [&] { return x.tanh(); });
    const at::Tensor y = on(b(), [&] { return x.exp().mul(0.5); });
    order(b(), a());
    y.record_stream(a());
    (void)on(a(), [&] {
      const at::Tensor loss = (y * z).sum();
      return torch::autograd::grad({loss}, {leaf}, {}, /*retain_graph=*/true)[0];
    });
    order(a(), b());
  }
  expect_clean();
}

TEST_P(ModelEventsContract, WhatTheHostHasSeenIsOrdered) {
  at::Tensor x = ones_on_a();
  a().synchronize();
  x = on(b(), [&] { return x.exp(); });
  c10::Event event(GetParam().type);
  event.record(b());
  event.synchronize();
  x = on(a(), [&] { return x.exp(); });
  drain(a());
  EXPECT_TRUE(a().query());
  x = on(b(), [&] { return x.exp(); });
  event.record(b());
  drain(b());
  EXPECT_TRUE(event.query());
  x = on(a(), [&] { return x.exp(); });
  {
    const c10::StreamGuard on_a(a());
    EXPECT_GT(x.sum().item<float>(), 0.0F);
  }
  (void)on(b(), [&] { return x.add_(1); });
  expect_clean();
}

TEST_P(ModelEventsContract, AHostWriteMustWaitForTheCopyThatReads) {
  const at::Tensor batch = at::ones({1024}).pin_memory();
  at::Tensor x = on(a(), [&] { return batch.to(runtime().device(), /*non_blocking=*/true); });
  a().synchronize();
  batch.add_(1);
  x = on(a(), [&] { return batch.to(runtime().device(), true); });
  c10::Event copied(GetParam().type);
  copied.record(a());
  copied.synchronize();
  batch.add_(1);
  x = on(a(), [&] { return batch.to(runtime().device(), /*non_blocking=*/false); });
  batch.add_(1);  // the copy took its bytes before it returned
  expect_clean();
  x = on(a(), [&] { return batch.to(runtime().device(), true); });
  batch.add_(1);
  expect_found({"aten::to on stream", "reads pinned host memory", "aten::add_ by the host", "writes",
                "the host must wait for an event that stream"});
}

TEST_P(ModelEventsContract, AHostReadMustWaitForTheCopyThatWrites) {
  const at::Tensor x = ones_on_a();
  const at::Tensor result = at::empty({1024}).pin_memory();
  (void)on(a(), [&] { return result.copy_(x, /*non_blocking=*/true); });
  a().synchronize();
  (void)result.sum();
  (void)on(a(), [&] { return result.copy_(x); });  // is there when it returns
  (void)result.sum();
  (void)on(a(), [&] { return x.cpu(); }).sum();
  expect_clean();
  (void)on(a(), [&] { return result.copy_(x, /*non_blocking=*/true); });
  (void)result.sum();
  expect_found({"aten::copy_ on stream", "writes pinned host memory", "aten::sum by the host", "reads"});
}

TEST_P(ModelEventsContract, MemoryHandedOnByRecordStreamIsOrdered) {
  for (int i = 0; i < 8; ++i) {
    const at::Tensor x = ones_on_a();
    order(a(), b());
    (void)on(b(), [&] { return x.exp(); });
    if (i % 2 == 0) {
      x.record_stream(b());
    } else {
      c10::impl::getDeviceGuardImpl(GetParam().type)->recordDataPtrOnStream(x.storage().data_ptr(), b());
    }
    drain(b());  // so that the allocator finds it done
  }
  expect_clean();
}

TEST_P(ModelEventsContract, FreedMemoryThatAnotherStreamReadsIsFound) {
  at::Tensor x = ones_on_a();
  order(a(), b());
  const at::Tensor y = on(b(), [&] { return x.exp(); });
  const void* address = x.data_ptr();
  x.reset();
  x = on(a(), [&] { return at::zeros({1024}, options()); });
  ASSERT_EQ(x.data_ptr(), address);
  expect_found({"aten::exp", "reads", "writes"});
}

TEST_P(ModelEventsContract, AForkInsideACaptureIsPartOfTheGraph) {
  const at::Tensor x = on(capture(), [&] { return at::ones({1024}, options()); });
  checked().synchronize(capture());
  const MemoryPool pool = checked().create_pool();
  at::Tensor kept;
  const Graph graph = captured(pool, [&] {
    order(capture(), b());
    const at::Tensor y = on(b(), [&] { return x.exp(); });
    const at::Tensor z = x.tanh();
    order(b(), capture());
    kept = y + z;
  });
  checked().launch(graph, capture());
  checked().launch(graph, capture());
  expect_clean();
  runtime().synchronize_device();
}

std::vector<Subject> checked_subjects() {
  std::vector<Subject> result;
  const std::vector<Subject> all = every_subject();
  std::copy_if(all.begin(), all.end(), std::back_inserter(result),
               [](const Subject& subject) { return subject.checked; });
  return result;
}

INSTANTIATE_TEST_SUITE_P(, ModelEventsContract, testing::ValuesIn(checked_subjects()), subject_name);

}  // namespace
}  // namespace sidestream::contract
