// Reuse of a pool's memory on other streams: work that the pool orders has no finding and gives the same bytes in every order.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <gtest/gtest.h>

#include "sidestream/tensor_pool.h"
#include "sidestream/testing/schedule_check.h"
#include "unit/sim/device/fixture.h"

namespace sidestream {
namespace {

constexpr std::int64_t kNumbers = 1024;

class TensorPoolOrderTest : public sim::SimTest {
 protected:
  [[nodiscard]] at::Tensor filled(double value) const { return at::full({kNumbers}, value, options()); }
  void expect(bool ordered, ScheduleCheck& check) {
    EXPECT_EQ(check.findings().empty(), ordered) << (check.findings().empty() ? "" : check.findings().front());
    EXPECT_EQ(check.search(300).diverged == 0, ordered);
  }
  void copy_out(const at::Tensor& host, const at::Tensor& device, c10::Stream stream) {
    runtime().copy_to_host(host.mutable_data_ptr(), device.const_data_ptr(), device.nbytes(), stream);
  }
  void copy_in(const at::Tensor& device, const at::Tensor& host, c10::Stream stream) {
    runtime().copy_to_device(device.mutable_data_ptr(), host.const_data_ptr(), device.nbytes(), stream);
  }
  /// Two tensors are offloaded and reloaded through one host tensor of `pool`, which `release(i, host)` gives back after each reload. The
  /// second is copied out while the first may still be copied in.
  template <class Release>
  void offload_two(TensorPool& pool, bool ordered, const Release& release) {
    const at::Tensor x[] = {filled(3), filled(5)};
    const at::Tensor y[] = {filled(0), filled(0)};
    runtime().synchronize_device();
    ScheduleCheck check(runtime().device());
    for (const int i : {0, 1}) {
      at::Tensor host = pool.allocate({kNumbers}, at::kFloat, copies());
      copy_out(host, x[i], copies());
      order(copies(), side());
      copy_in(y[i], host, side());
      release(i, host);
    }
    order(side(), main());
    check.stop({{"first", y[0]}, {"second", y[1]}});
    expect(ordered, check);
  }
  void reuse_host_memory(bool freed_after_the_reload) {
    TensorPool pool(TensorPool::Memory::host, runtime().device());
    pool.plan({kNumbers}, at::kFloat, 1);
    pool.seal();
    offload_two(pool, freed_after_the_reload,
                [&](int /*i*/, const at::Tensor& host) { pool.free(host, freed_after_the_reload ? side() : main()); });
  }
  /// Two products on two streams use one device tensor.
  void reuse_device_memory(bool freed_behind_its_reader) {
    TensorPool pool(TensorPool::Memory::device, runtime().device());
    const at::Tensor x = filled(3);
    const at::Tensor y[] = {filled(0), filled(0)};
    runtime().synchronize_device();
    ScheduleCheck check(runtime().device());
    const c10::Stream streams[] = {side(), copies()};
    for (const int i : {0, 1}) {
      const StreamGuard current(runtime(), streams[i]);
      const at::Tensor product = pool.allocate({kNumbers}, at::kFloat);
      at::mul_out(const_cast<at::Tensor&>(product), x, filled(i + 1.0));
      y[i].copy_(product);
      freed_behind_its_reader ? pool.free(product) : pool.free(product, main());
      EXPECT_EQ(pool.statistics().total, 1);
    }
    order(side(), main());
    order(copies(), main());
    check.stop({{"first", y[0]}, {"second", y[1]}});
    expect(freed_behind_its_reader, check);
  }
};

TEST_F(TensorPoolOrderTest, HostMemoryIsWrittenAfterTheCopyThatLastReadIt) { reuse_host_memory(true); }
TEST_F(TensorPoolOrderTest, HostMemoryFreedOnAnotherStreamIsFound) { reuse_host_memory(false); }
TEST_F(TensorPoolOrderTest, DeviceMemoryIsWrittenAfterItsLastReader) { reuse_device_memory(true); }
TEST_F(TensorPoolOrderTest, DeviceMemoryFreedOnAnotherStreamIsFound) { reuse_device_memory(false); }

TEST_F(TensorPoolOrderTest, TheFirstUserWaitsForTheUserOfTheBlockBeforeThePool) {
  TensorPool pool(TensorPool::Memory::device, runtime().device());
  const at::Tensor y = filled(0);
  at::Tensor before = filled(3);
  const void* const block = before.const_data_ptr();
  runtime().synchronize_device();
  ScheduleCheck check(runtime().device());
  y.copy_(before);
  before.reset();
  pool.plan({kNumbers}, at::kFloat, 1);
  const StreamGuard current(runtime(), side());
  at::Tensor tensor = pool.allocate({kNumbers}, at::kFloat);
  ASSERT_EQ(tensor.const_data_ptr(), block);
  tensor.fill_(9);
  check.stop({{"copy", y}});
  expect(true, check);
}

TEST_F(TensorPoolOrderTest, ClearedMemoryIsReusedAfterItsLastUse) {
  TensorPool pool(TensorPool::Memory::device, runtime().device());
  const at::Tensor y = filled(0);
  at::Tensor tensor = pool.allocate({kNumbers}, at::kFloat);
  tensor.fill_(3);
  runtime().synchronize_device();
  ScheduleCheck check(runtime().device());
  {
    const StreamGuard current(runtime(), side());
    y.copy_(tensor);
    pool.free(tensor);
  }
  tensor.reset();
  pool.clear();
  at::Tensor next = at::empty({kNumbers}, options());
  next.fill_(9);
  order(side(), main());
  check.stop({{"copy", y}});
  expect(true, check);
}

TEST_F(TensorPoolOrderTest, ResetIsAFreeOnTheCurrentStream) {
  TensorPool pool(TensorPool::Memory::host, runtime().device());
  offload_two(pool, true, [&](int i, at::Tensor& host) {
    if (i == 0) {
      const StreamGuard current(runtime(), side());
      host.reset();
      pool.reset();
    }
  });
  EXPECT_EQ(pool.statistics().total, 1);
}

}  // namespace
}  // namespace sidestream
