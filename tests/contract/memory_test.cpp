#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>

#include "contract/fixture.h"
#include "sidestream/error.h"

namespace sidestream::contract {
namespace {

constexpr std::int64_t kMiB = 1 << 20;

class CopyContract : public RuntimeContract {};

TEST_P(CopyContract, BytesGoToPinnedMemoryAndBack) {
  const auto pinned = runtime().allocate_pinned(4096);
  const auto source = filled(3, 1024);
  const auto target = filled(0, 1024);
  const auto stream = runtime().current_stream();
  runtime().copy_to_host(pinned.data(), source.const_data_ptr(), 4096, stream);
  runtime().copy_to_device(target.mutable_data_ptr(), pinned.data(), 4096, stream);
  EXPECT_TRUE(all_equal(target, 3));
  EXPECT_EQ(reinterpret_cast<const float*>(pinned.data())[1023], 3.0F);
}

TEST_P(CopyContract, ManyBytesGoToPinnedMemoryAndBack) {
  constexpr std::int64_t kElements = std::int64_t{5} << 20;
  const std::size_t bytes = kElements * sizeof(float);
  const auto source = filled(3, kElements);
  const auto target = filled(0, kElements);
  const auto stream = runtime().current_stream();
  for (int time = 0; time < 2; ++time) {  // the second may lie where the first was
    const auto pinned = runtime().allocate_pinned(bytes);
    runtime().copy_to_host(pinned.data(), source.const_data_ptr(), bytes, stream);
    runtime().copy_to_device(target.mutable_data_ptr(), pinned.data(), bytes, stream);
    EXPECT_TRUE(all_equal(target, 3));
  }
}

TEST_P(CopyContract, OnlyTheGivenBytesAreWritten) {
  const auto pinned = runtime().allocate_pinned(4096);
  std::memset(pinned.data(), 0x5a, 4096);
  const auto source = filled(0, 1024);
  runtime().copy_to_host(pinned.data() + 8, source.const_data_ptr(), 16, runtime().current_stream());
  runtime().synchronize_device();
  for (std::size_t i = 0; i < 4096; ++i) {
    ASSERT_EQ(std::to_integer<int>(pinned.data()[i]), i >= 8 && i < 24 ? 0 : 0x5a) << "byte " << i;
  }
}

TEST_P(CopyContract, ACopyWaitsForTheComputeItIsOrderedAfter) {
  const auto pinned = runtime().allocate_pinned(4096);
  std::memset(pinned.data(), 0, 4096);
  const auto tensor = filled(1, 1024);
  const auto ready = runtime().create_event();
  delay(runtime().current_stream());
  tensor.fill_(4);
  runtime().record(ready, runtime().current_stream());
  runtime().wait(copies(), ready);
  runtime().copy_to_host(pinned.data(), tensor.const_data_ptr(), 4096, copies());
  runtime().synchronize(copies());
  EXPECT_EQ(reinterpret_cast<const float*>(pinned.data())[0], 4.0F);
  EXPECT_EQ(reinterpret_cast<const float*>(pinned.data())[1023], 4.0F);
}

TEST_P(CopyContract, ComputeWaitsForTheCopyItIsOrderedAfter) {
  const auto pinned = runtime().allocate_pinned(4096);
  std::fill_n(reinterpret_cast<float*>(pinned.data()), 1024, 9.0F);
  const auto tensor = filled(1, 1024);
  runtime().synchronize_device();
  const auto back = runtime().create_event();
  delay(copies());
  runtime().copy_to_device(tensor.mutable_data_ptr(), pinned.data(), 4096, copies());
  runtime().record(back, copies());
  runtime().wait(runtime().current_stream(), back);
  const auto sum = at::add(tensor, 1);
  EXPECT_TRUE(all_equal(sum, 10));
}

TEST_P(CopyContract, CopiesOfOneStreamKeepTheirOrder) {
  const auto pinned = runtime().allocate_pinned(8192);
  auto* const host = reinterpret_cast<float*>(pinned.data());
  std::fill_n(host, 1024, 1.0F);
  std::fill_n(host + 1024, 1024, 2.0F);
  const auto tensor = filled(0, 1024);
  runtime().synchronize_device();
  runtime().copy_to_device(tensor.mutable_data_ptr(), host, 4096, copies());
  runtime().copy_to_device(tensor.mutable_data_ptr(), host + 1024, 4096, copies());
  runtime().copy_to_host(host, tensor.const_data_ptr(), 4096, copies());
  runtime().synchronize(copies());
  EXPECT_EQ(host[0], 2.0F);
  EXPECT_EQ(host[1023], 2.0F);
}

class PinnedContract : public RuntimeContract {};

TEST_P(PinnedContract, HasTheBytesAskedForOnAPageBoundary) {
  std::vector<PinnedMemory> held;
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{513}, std::size_t{4096}, std::size_t{100},
                                  std::size_t{3 * kMiB + 7}, std::size_t{70 * kMiB + 7}}) {
    held.push_back(runtime().allocate_pinned(bytes));
    EXPECT_EQ(held.back().bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(held.back().data()) % 4096, 0U);
    std::memset(held.back().data(), static_cast<int>(held.size()), bytes);
  }
  for (std::size_t i = 0; i < held.size(); ++i) {
    EXPECT_EQ(std::to_integer<std::size_t>(held[i].data()[0]), i + 1);
    EXPECT_EQ(std::to_integer<std::size_t>(held[i].data()[held[i].bytes() - 1]), i + 1);
  }
}

TEST_P(PinnedContract, ExhaustionSaysWhatRanOut) {
  try {
    (void)runtime().allocate_pinned(std::size_t{1} << 46);
    FAIL() << "64 TiB were pinned";
  } catch (const DeviceError& error) {
    EXPECT_NE(std::string(error.what()).find("pinned host memory"), std::string::npos) << error.what();
  }
  const auto after = runtime().allocate_pinned(4096);
  EXPECT_NE(after.data(), nullptr);
}

class MemoryContract : public RuntimeContract {
 protected:
  /// Copies `x`, which the side stream made, on the stream of copies, which is late.
  void copy_late(PinnedMemory& to, const at::Tensor& x) {
    const auto ready = runtime().create_event();
    runtime().record(ready, side());
    runtime().wait(copies(), ready);
    delay(copies());
    runtime().copy_to_host(to.data(), x.const_data_ptr(), x.nbytes(), copies());
  }
  /// Waits for the device.
  [[nodiscard]] bool all_equal_on_host(const PinnedMemory& memory, std::int64_t numel, float value) {
    runtime().synchronize_device();
    const auto* const data = reinterpret_cast<const float*>(memory.data());
    return std::all_of(data, data + numel, [&](float each) { return each == value; });
  }
};

TEST_P(MemoryContract, StatisticsCountLiveTensorsAndTheirPeak) {
  runtime().synchronize_device();
  runtime().release_cached_memory();
  runtime().reset_peak_memory_stats();
  const auto before = runtime().memory_stats();
  EXPECT_EQ(before.allocated_peak, before.allocated);
  {
    const auto one = filled(1, 4 * kMiB);
    const auto held = runtime().memory_stats();
    EXPECT_EQ(held.allocated - before.allocated, 16 * kMiB);
    EXPECT_GE(held.reserved, held.allocated);
    const auto two = filled(1, 2 * kMiB);
    EXPECT_EQ(runtime().memory_stats().allocated - before.allocated, 24 * kMiB);
  }
  const auto after = runtime().memory_stats();
  EXPECT_EQ(after.allocated, before.allocated);
  EXPECT_EQ(after.allocated_peak - before.allocated, 24 * kMiB);
  EXPECT_GE(after.reserved - before.reserved, 24 * kMiB) << "freed memory stays cached";
  runtime().synchronize_device();
  runtime().release_cached_memory();
  EXPECT_EQ(runtime().memory_stats().reserved, before.reserved);
  EXPECT_GE(runtime().memory_stats().reserved_peak - before.reserved, 24 * kMiB);
  runtime().reset_peak_memory_stats();
  EXPECT_EQ(runtime().memory_stats().reserved_peak, runtime().memory_stats().reserved);
}

// Nobody else uses the device meanwhile.
TEST_P(MemoryContract, WhatIsFreeAndWhatIsReservedAndTheRestAreTheDevice) {
  runtime().synchronize_device();
  runtime().release_cached_memory();
  const auto whole = [&] {
    const DeviceRoom room = runtime().room();
    EXPECT_GE(room.outside, 0);
    return room.free + room.outside + runtime().memory_stats().reserved;
  };
  const DeviceRoom before = runtime().room();
  const std::int64_t all = whole();
  const auto tensor = filled(1, 16 * kMiB);
  EXPECT_EQ(before.free - runtime().room().free, 64 * kMiB);
  EXPECT_EQ(runtime().room().outside, before.outside);
  EXPECT_EQ(whole(), all);
}

TEST_P(MemoryContract, FreedMemoryIsUsedAgain) {
  const void* first = nullptr;
  {
    const auto tensor = filled(1, 4 * kMiB);
    first = tensor.const_data_ptr();
  }
  const auto tensor = filled(2, 4 * kMiB);
  EXPECT_EQ(tensor.const_data_ptr(), first);
}

class PoolContract : public RuntimeContract {
 protected:
  // A graph whose private memory holds at least 16 MiB; `inside` is a tensor of it.
  Graph capture_into(const MemoryPool& pool, at::Tensor& inside) {
    return captured(pool, [&] { inside = filled(1, 4 * kMiB); });
  }
};

TEST_P(PoolContract, MemoryOfACaptureLivesUntilPoolAndGraphAreGone) {
  // The first capture makes what LibTorch keeps for the stream for good.
  {
    at::Tensor inside;
    auto pool = runtime().create_pool();
    const auto graph = capture_into(pool, inside);
  }
  runtime().release_cached_memory();
  const auto before = runtime().memory_stats();
  auto pool = runtime().create_pool();
  at::Tensor inside;
  auto graph = capture_into(pool, inside);
  EXPECT_GE(runtime().memory_stats().reserved - before.reserved, 16 * kMiB);
  inside.reset();
  runtime().release_cached_memory();
  EXPECT_GE(runtime().memory_stats().reserved - before.reserved, 16 * kMiB) << "the graph still uses it";
  pool.reset();
  runtime().release_cached_memory();
  EXPECT_GE(runtime().memory_stats().reserved - before.reserved, 16 * kMiB) << "the graph still uses it";
  graph.reset();
  runtime().release_cached_memory();
  EXPECT_EQ(runtime().memory_stats().reserved, before.reserved);
  EXPECT_EQ(runtime().memory_stats().allocated, before.allocated);
}

TEST_P(PoolContract, AReleasedTensorOfOneCaptureIsReusedByTheNextOfThePool) {
  const auto pool = runtime().create_pool();
  at::Tensor inside;
  const auto first = capture_into(pool, inside);
  const auto* const address = inside.const_data_ptr();
  inside.reset();
  const auto second = capture_into(pool, inside);
  EXPECT_EQ(inside.const_data_ptr(), address);
}

TEST_P(PoolContract, TellsHowMuchOfItTensorsHold) {
  const auto pool = runtime().create_pool();
  EXPECT_EQ(runtime().allocated_in(pool), 0);
  at::Tensor inside;
  const auto graph = capture_into(pool, inside);
  const auto outside = filled(1, 4 * kMiB);
  EXPECT_EQ(runtime().allocated_in(pool), 16 * kMiB);
  inside.reset();
  EXPECT_EQ(runtime().allocated_in(pool), 0);
}

TEST_P(PoolContract, TensorsOutsideOfACaptureDoNotComeFromThePool) {
  const auto pool = runtime().create_pool();
  at::Tensor inside;
  const auto graph = capture_into(pool, inside);
  const auto* const address = inside.const_data_ptr();
  inside.reset();
  const StreamGuard guard(runtime(), capture());
  const auto outside = filled(1, 4 * kMiB);
  EXPECT_NE(outside.const_data_ptr(), address);
}

TEST_P(PoolContract, ATensorOfAPoolOutlivesItsGraph) {
  at::Tensor inside;
  {
    const auto pool = runtime().create_pool();
    auto graph = capture_into(pool, inside);
    runtime().launch(graph, side());
    runtime().synchronize(side());
  }
  EXPECT_TRUE(all_equal(inside, 1));
}

TEST_P(MemoryContract, MemoryThatAnotherStreamUsesIsLentAgainWhenThatStreamIsDone) {
  delay(copies());  // makes what it keeps
  runtime().synchronize_device();
  const auto before = runtime().memory_stats().allocated;
  auto pinned = runtime().allocate_pinned(16 * kMiB);
  const StreamGuard on_side(runtime(), side());
  auto x = filled(3, 4 * kMiB);
  copy_late(pinned, x);
  x.record_stream(copies());
  const auto* const address = x.const_data_ptr();
  x.reset();
  EXPECT_EQ(runtime().memory_stats().allocated, before) << "freed memory counts no more";
  const auto other = filled(9, 4 * kMiB);
  EXPECT_TRUE(all_equal_on_host(pinned, 4 * kMiB, 3));
  std::vector<at::Tensor> taken;
  bool again = other.const_data_ptr() == address;
  for (int i = 0; i < 8 && !again; ++i) {
    taken.push_back(at::empty({4 * kMiB}, options()));
    again = taken.back().const_data_ptr() == address;
  }
  EXPECT_TRUE(again) << "it was never lent again";
}

TEST_P(MemoryContract, MemoryOfAStreamIsKeptForTheWorkThatItWaitsFor) {
  delay(copies());  // makes what it keeps
  runtime().synchronize_device();
  auto pinned = runtime().allocate_pinned(16 * kMiB);
  const StreamGuard on_side(runtime(), side());
  auto x = filled(3, 4 * kMiB);
  copy_late(pinned, x);
  const auto third = runtime().create_stream();
  const auto done = runtime().create_event();
  runtime().record(done, copies());
  runtime().wait(third, done);
  x.record_stream(third);
  x.reset();
  const auto other = filled(9, 4 * kMiB);
  EXPECT_TRUE(all_equal_on_host(pinned, 4 * kMiB, 3));
}

SIDESTREAM_ON_EVERY_BACKEND(CopyContract);
SIDESTREAM_ON_EVERY_BACKEND(PinnedContract);
SIDESTREAM_ON_EVERY_BACKEND(MemoryContract);
SIDESTREAM_ON_EVERY_BACKEND(PoolContract);

}  // namespace
}  // namespace sidestream::contract
