#include "sidestream/tensor_pool.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "sidestream/error.h"
#include "sidestream/testing/simulator.h"
#include "threads/at_once.h"
#include "unit/sim/device/fixture.h"

namespace sidestream {
namespace {

using Memory = TensorPool::Memory;
constexpr std::int64_t kLarge = 3 << 20;  // cached blocks are smaller

class TensorPoolTest : public sim::SimTest, public testing::WithParamInterface<Memory> {
 protected:
  [[nodiscard]] TensorPool pool() const { return TensorPool(GetParam(), runtime().device()); }
  [[nodiscard]] c10::Device place() const { return GetParam() == Memory::host ? c10::kCPU : runtime().device(); }
  /// From now on, the device and its driver have no memory to give, in neither place.
  void exhaust() const {
    runtime().release_cached_memory();
    set_memory_limit(runtime().device(), 0);
    set_pinned_limit(runtime().device(), 0);
  }
  void TearDown() override {
    set_memory_limit(runtime().device(), std::numeric_limits<std::size_t>::max());
    set_pinned_limit(runtime().device(), std::numeric_limits<std::size_t>::max());
    SimTest::TearDown();
  }
};

TEST_P(TensorPoolTest, TensorsAreWhatWasAskedFor) {
  (void)at::zeros({1}).pin_memory();  // before, LibTorch holds no memory for pinned
  TensorPool pool = this->pool();
  at::Tensor tensor = pool.allocate({3, 5}, at::kHalf);
  EXPECT_EQ(tensor.sizes(), (std::vector<std::int64_t>{3, 5}));
  EXPECT_EQ(tensor.scalar_type(), at::kHalf);
  EXPECT_EQ(tensor.device(), place());
  EXPECT_TRUE(tensor.is_contiguous());
  EXPECT_EQ(tensor.is_pinned(), GetParam() == Memory::host);
  EXPECT_EQ(tensor.storage().nbytes(), 30U) << "exact bytes";
  EXPECT_FALSE(tensor.storage().resizable());
  EXPECT_EQ(pool.allocate({}, at::kLong).dim(), 0);
  const at::Tensor empty = pool.allocate({0, 4}, at::kFloat);
  EXPECT_EQ(empty.numel(), 0);
  EXPECT_NE(pool.allocate({0, 4}, at::kFloat).storage().unsafeGetStorageImpl(), empty.storage().unsafeGetStorageImpl());
  pool.free(empty);
  EXPECT_THROWS(UsageError, "no tensor of shape [2, -1]", (void)pool.allocate({2, -1}, at::kFloat));
  EXPECT_THROWS(UsageError, "dtype UNKNOWN_SCALAR", (void)pool.allocate({2}, at::ScalarType::Undefined));
  EXPECT_THROW(TensorPool(GetParam(), c10::kCPU), UsageError);
}

TEST_P(TensorPoolTest, WhatNoTensorCanBeIsRefusedAndLeavesNoEntry) {
  TensorPool pool = this->pool();
  const std::int64_t large = std::int64_t{1} << 31;
  EXPECT_THROWS(UsageError, "no tensor of shape [2147483648, 2147483648] and dtype Float: its bytes are too many",
                pool.plan({large, large}, at::kFloat, 1));
  EXPECT_THROWS(UsageError, "its bytes are too many", (void)pool.allocate({large, large, 4}, at::kByte));
  EXPECT_THROWS(UsageError, "its bytes are too many", (void)pool.allocate({large, large, 2}, at::kByte));
  EXPECT_THROWS(UsageError, "its bytes are too many", (void)pool.allocate({0, large, large, 4}, at::kByte));
  EXPECT_THROWS(UsageError, "each size must be 0 or more", pool.plan({4, -4}, at::kFloat, 1));
  EXPECT_THROWS(UsageError, "name a dtype", pool.plan({4}, at::ScalarType::Undefined, 1));
  EXPECT_THROWS(UsageError, "plan() of -1 tensors of shape [4] and dtype Float; the count must be 0 or more",
                pool.plan({4}, at::kFloat, -1));
  pool.plan({4}, at::kFloat, 0);
  EXPECT_TRUE(pool.status().empty());
  exhaust();
  EXPECT_ANY_THROW(pool.plan({kLarge}, at::kFloat, 1));
  EXPECT_TRUE(pool.status().empty());
}

TEST_P(TensorPoolTest, DtypesOfNoPlainTensorAreRefusedAndLeaveNoEntry) {
  TensorPool pool = this->pool();
  for (const c10::ScalarType dtype : {c10::kQInt8, c10::kQUInt8, c10::kQInt32, c10::kQUInt4x2, c10::kQUInt2x4}) {
    EXPECT_THROWS(UsageError, "allocate kByte, kChar or kInt", (void)pool.allocate({4}, dtype));
    EXPECT_THROWS(UsageError, "allocate kByte, kChar or kInt", pool.plan({4}, dtype, 1));
  }
  EXPECT_THROWS(UsageError, "name a dtype", (void)pool.allocate({4}, c10::ScalarType::NumOptions));
  EXPECT_TRUE(pool.status().empty());
}

TEST_P(TensorPoolTest, AUserLeavesNothingOfAutogradToTheNext) {
  TensorPool pool = this->pool();
  at::Tensor tensor;
  {
    const c10::InferenceMode inference;
    tensor = pool.allocate({4}, at::kFloat);
  }
  EXPECT_FALSE(tensor.is_inference());
  tensor.requires_grad_(true);
  pool.free(tensor);
  const at::Tensor next = pool.allocate({4}, at::kFloat);
  EXPECT_EQ(next.data_ptr(), tensor.data_ptr());
  EXPECT_FALSE(next.requires_grad());
  EXPECT_EQ(next._version(), 0);
}

TEST_P(TensorPoolTest, HandsOutTheOneThatIsFreeForLongest) {
  TensorPool pool = this->pool();
  const at::Tensor a = pool.allocate({4, 8}, at::kFloat), b = pool.allocate({4, 8}, at::kFloat),
                   c = pool.allocate({4, 8}, at::kFloat);
  for (const at::Tensor* tensor : {&b, &a, &c}) {
    pool.free(*tensor);
  }
  EXPECT_NE(pool.allocate({8, 4}, at::kFloat).data_ptr(), b.data_ptr()) << "another shape";
  EXPECT_NE(pool.allocate({4, 8}, at::kInt).data_ptr(), b.data_ptr()) << "another dtype";
  for (const at::Tensor* tensor : {&b, &a, &c}) {
    EXPECT_EQ(pool.allocate({4, 8}, at::kFloat).data_ptr(), tensor->data_ptr());
  }
}

TEST_P(TensorPoolTest, StatusAndStatisticsCount) {
  TensorPool pool = this->pool();
  EXPECT_TRUE(pool.status().empty());
  EXPECT_EQ(pool.status({4}, at::kFloat).total, 0);
  EXPECT_EQ(pool.status({4}, at::kFloat).utilization(), 0);
  pool.plan({4}, at::kFloat, 4);
  const at::Tensor a = pool.allocate({4}, at::kFloat), b = pool.allocate({2, 2}, at::kDouble);
  const TensorPoolStatus four = pool.status({4}, at::kFloat);
  EXPECT_EQ(four.sizes, std::vector<std::int64_t>{4});
  EXPECT_EQ(four.dtype, at::kFloat);
  EXPECT_EQ(four.total, 4);
  EXPECT_EQ(four.in_use, 1);
  EXPECT_EQ(four.free(), 3);
  EXPECT_EQ(four.utilization(), 0.25);
  pool.free(b);
  EXPECT_EQ(pool.status({2, 2}, at::kDouble).free(), 1);
  EXPECT_EQ(pool.status().size(), 2U);
  EXPECT_THROW(pool.free(b), UsageError);
  const TensorPoolStatistics all = pool.statistics();
  EXPECT_EQ(all.allocation_requests, 2);
  EXPECT_EQ(all.free_requests, 2);
  EXPECT_EQ(all.hits, 1);
  EXPECT_EQ(all.misses, 1);
  EXPECT_EQ(all.total, 5);
  EXPECT_EQ(all.in_use, 1);
  EXPECT_EQ(all.bytes, 4 * 16 + 32);
  EXPECT_EQ(all.allocations_after_seal, 0);
}

TEST_P(TensorPoolTest, ForeignAndDoubleFreesAreRefused) {
  TensorPool pool = this->pool(), other = this->pool();
  const at::Tensor tensor = pool.allocate({4}, at::kFloat), others = other.allocate({4}, at::kFloat);
  const char* const foreign = "a tensor that this pool did not allocate; free it into the pool";
  EXPECT_THROWS(UsageError, foreign, pool.free(others));
  EXPECT_THROWS(UsageError, foreign, pool.free(at::Tensor()));
  EXPECT_THROWS(UsageError, foreign, pool.free(at::zeros({4})));
  EXPECT_THROWS(UsageError, foreign, pool.free(at::zeros({4}).to_sparse()));
  pool.free(tensor);
  EXPECT_THROWS(UsageError, "a tensor of shape [4] and dtype Float that is already free", pool.free(tensor));
  EXPECT_EQ(pool.status({4}, at::kFloat).free(), 1);
  EXPECT_EQ(pool.statistics().in_use, 0);
  other.free(others);
}

TEST_P(TensorPoolTest, AnAliasFreesTheTensor) {
  TensorPool pool = this->pool();
  for (int kind = 0; kind < 3; ++kind) {
    const at::Tensor tensor = pool.allocate({4, 8}, at::kFloat);
    pool.free(kind == 0 ? tensor.detach() : kind == 1 ? tensor.view({32}) : tensor.select(0, 2));
    EXPECT_EQ(pool.statistics().in_use, 0);
    EXPECT_THROWS(UsageError, "already free", pool.free(tensor));
  }
  EXPECT_EQ(pool.statistics().total, 1);
}

TEST_P(TensorPoolTest, ASealedPoolAllocatesNothing) {
  TensorPool pool = this->pool();
  const at::Tensor first = pool.allocate({kLarge}, at::kFloat);
  pool.plan({kLarge}, at::kFloat, 3);
  pool.plan({kLarge}, at::kFloat, 2);
  EXPECT_EQ(pool.statistics().total, 3);
  pool.seal();
  exhaust();
  const at::Tensor second = pool.allocate({kLarge}, at::kFloat), third = pool.allocate({kLarge}, at::kFloat);
  EXPECT_THROWS(UsageError,
                "no tensor of shape [3145728] and dtype Float is free (3 in use, 0 free), and the pool is sealed. Free "
                "one first, or "
                "plan() more of them before seal()",
                (void)pool.allocate({kLarge}, at::kFloat));
  EXPECT_THROWS(UsageError, "shape [3145729] and dtype Float is free (0 in use",
                (void)pool.allocate({kLarge + 1}, at::kFloat));
  EXPECT_THROWS(UsageError, "plan() after seal()", pool.plan({kLarge}, at::kFloat, 4));
  pool.free(second);
  EXPECT_EQ(pool.allocate({kLarge}, at::kFloat).data_ptr(), second.data_ptr());
  const TensorPoolStatistics counts = pool.statistics();
  EXPECT_EQ(counts.hits, 3);
  EXPECT_EQ(counts.misses, 3);
  EXPECT_EQ(counts.total, 3);
  EXPECT_EQ(counts.allocations_after_seal, 0);
  EXPECT_EQ(pool.status().size(), 1U);
}

TEST_P(TensorPoolTest, WithoutMemoryThePoolKeepsWhatItHas) {
  TensorPool pool = this->pool();
  const at::Tensor tensor = pool.allocate({kLarge}, at::kFloat);
  exhaust();
  EXPECT_ANY_THROW((void)pool.allocate({kLarge}, at::kFloat));
  EXPECT_ANY_THROW(pool.plan({kLarge}, at::kFloat, 2));
  if (GetParam() == Memory::host) {
    EXPECT_THROWS(DeviceError, "keep fewer tensors in pools", pool.plan({kLarge}, at::kFloat, 2));
  }
  EXPECT_EQ(pool.status({kLarge}, at::kFloat).total, 1);
  EXPECT_EQ(pool.statistics().in_use, 1);
  pool.free(tensor);
  EXPECT_EQ(pool.allocate({kLarge}, at::kFloat).data_ptr(), tensor.data_ptr());
}

TEST_P(TensorPoolTest, ResetTakesBackWhatWasDropped) {
  TensorPool pool = this->pool();
  at::Tensor freed = pool.allocate({4}, at::kFloat), dropped = pool.allocate({4}, at::kFloat);
  pool.free(freed);
  at::Tensor view = dropped.view({2, 2});
  dropped.reset();
  EXPECT_THROWS(UsageError, "reset() while a tensor of shape [4] and dtype Float is in use and still referenced",
                pool.reset());
  EXPECT_EQ(pool.statistics().in_use, 1) << "nothing is changed";
  view.reset();
  pool.reset();
  EXPECT_EQ(pool.statistics().in_use, 0);
  EXPECT_EQ(pool.statistics().total, 2);
  EXPECT_THROWS(UsageError, "already free", pool.free(freed));
  EXPECT_EQ(pool.allocate({4}, at::kFloat).data_ptr(), freed.data_ptr());
}

TEST_P(TensorPoolTest, ClearDropsTheMemoryThatNobodyUses) {
  const std::int64_t before = runtime().memory_stats().allocated;
  TensorPool pool = this->pool();
  at::Tensor held = pool.allocate({128}, at::kFloat), freed = pool.allocate({128}, at::kFloat);
  pool.free(freed);
  held.fill_(7);
  pool.seal();
  pool.clear();
  freed.reset();
  EXPECT_TRUE(pool.status().empty());
  EXPECT_EQ(pool.statistics().total + pool.statistics().in_use + pool.statistics().bytes, 0);
  EXPECT_EQ(pool.statistics().allocation_requests, 2);
  EXPECT_EQ(held.sum().item<float>(), 7 * 128) << "a reference keeps the memory";
  EXPECT_THROWS(UsageError, "did not allocate, or allocated before clear()", pool.free(held));
  const at::Tensor again = pool.allocate({128}, at::kFloat);
  EXPECT_NE(again.data_ptr(), held.data_ptr());
  pool.free(again);
  pool.clear();
  held.reset();
  EXPECT_EQ(runtime().memory_stats().allocated - before, GetParam() == Memory::host ? 0 : again.nbytes())
      << "`again` is the last reference";
}

TEST_P(TensorPoolTest, ATensorOutlivesItsPool) {
  at::Tensor held;
  {
    TensorPool pool = this->pool();
    held = pool.allocate({4}, at::kFloat);
  }
  held.fill_(3);
  EXPECT_EQ(held.sum().item<float>(), 12);
}

TEST_P(TensorPoolTest, ACaptureIsRefusedAndStaysValid) {
  TensorPool pool = this->pool();
  const at::Tensor tensor = pool.allocate({4}, at::kFloat), x = at::full({4}, 2, options());
  const MemoryPool graph_memory = runtime().create_pool();
  runtime().begin_capture(main(), graph_memory);
  const char* const text = "() on a stream that captures: the graph would use memory that the pool hands out again";
  EXPECT_THROWS(UsageError, text, (void)pool.allocate({4}, at::kFloat));
  EXPECT_THROWS(UsageError, text, (void)pool.allocate({4}, at::kFloat, side()));
  EXPECT_THROWS(UsageError, text, pool.free(tensor));
  EXPECT_THROWS(UsageError, text, pool.plan({4}, at::kFloat, 2));
  EXPECT_THROWS(UsageError, text, pool.reset());
  EXPECT_EQ(pool.statistics().in_use, 1);
  EXPECT_EQ(pool.status().size(), 1U);
  at::Tensor y = at::mul(x, 3);
  pool.clear();
  const Graph graph = runtime().end_capture(main());
  EXPECT_THROWS(UsageError, "before clear()", pool.free(tensor));
  runtime().launch(graph, main());
  runtime().synchronize(main());
  EXPECT_EQ(first(y), 6);
  EXPECT_THROWS(UsageError, "belongs to another backend",
                (void)pool.allocate({4}, at::kFloat, c10::Stream(c10::Stream::DEFAULT, c10::kCPU)));
}

TEST_P(TensorPoolTest, ThreadsNeverShareATensor) {
  constexpr int kThreads = 3, kTimes = 20'000;
  TensorPool pool = this->pool();
  pool.plan({16}, at::kInt, kThreads);
  pool.seal();
  std::atomic<bool> clashed = false;
  test::at_once(kThreads, [&](int mark) {
    for (int i = 0; i < kTimes; ++i) {
      const at::Tensor tensor = pool.allocate({16}, at::kInt);
      auto* const data = static_cast<int*>(tensor.mutable_data_ptr());  // the simulated device's memory is the host's
      std::fill(data, data + 16, mark);
      clashed = clashed || std::count(data, data + 16, mark) != 16;
      pool.free(tensor);
    }
  });
  EXPECT_FALSE(clashed);
  EXPECT_EQ(pool.statistics().in_use, 0);
  EXPECT_EQ(pool.statistics().hits, kThreads * kTimes);
  EXPECT_EQ(pool.status({16}, at::kInt).free(), kThreads);
}

INSTANTIATE_TEST_SUITE_P(InBothPlaces, TensorPoolTest, testing::Values(Memory::host, Memory::device),
                         [](const auto& test) { return test.param == Memory::host ? "Host" : "Device"; });

}  // namespace
}  // namespace sidestream
