#include "graphs/sandbox/effects_undone.h"

#include <cstdint>
#include <cstring>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

namespace sidestream {
namespace {

const c10::Device cpu(c10::DeviceType::CPU);

/// As a held output is given other memory before the next replay overwrites this.
void give_other_memory(const at::Tensor& tensor) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  c10::DataPtr other = c10::GetCPUAllocator()->allocate(storage.nbytes());
  std::memcpy(other.get(), storage.data(), storage.nbytes());
  const c10::DataPtr before = storage.set_data_ptr(std::move(other));
  std::memset(before.get(), 0x5a, storage.nbytes());
}

TEST(EffectsUndoneTest, PutsBackWhatOperatorsWroteAndDrew) {
  const at::Tensor whole = at::arange(8.0F);
  const at::Tensor view = whole.slice(0, 2, 5);
  const at::Tensor before = whole.clone();
  at::Tensor drawn;
  {
    const EffectsUndone undone(cpu, {});
    view.add_(1);
    drawn = at::rand({4});
    undone.check();
    EXPECT_FALSE(at::equal(whole, before));
  }
  EXPECT_TRUE(at::equal(whole, before));
  EXPECT_TRUE(at::equal(at::rand({4}), drawn));
}

TEST(EffectsUndoneTest, PutsBackTheGeneratorsThatAreNamed) {
  const at::Generator generator = at::detail::createCPUGenerator(8);
  at::Tensor drawn;
  {
    const EffectsUndone undone(cpu, {}, {generator});
    drawn = at::rand({4}, generator);
  }
  EXPECT_TRUE(at::equal(at::rand({4}, generator), drawn));
}

TEST(EffectsUndoneTest, PutsBackInTheMemoryThatAStorageHasByThen) {
  const at::Tensor tensor = at::arange(8.0F);
  const at::Tensor before = tensor.clone();
  {
    const EffectsUndone undone(cpu, {});
    tensor.add_(1);
    give_other_memory(tensor);
    tensor.add_(1);
  }
  EXPECT_TRUE(at::equal(tensor, before));
}

TEST(EffectsUndoneTest, LeavesVersionCountersAsTheRunLeftThem) {
  const at::Tensor tensor = at::arange(8.0F);
  std::uint32_t version = 0;
  {
    const EffectsUndone undone(cpu, {tensor});
    tensor.add_(1);
    version = tensor._version();
  }
  EXPECT_EQ(tensor._version(), version);
}

TEST(EffectsUndoneTest, HoldsNothingThatTheRunLetsGo) {
  at::Tensor tensor = at::arange(8.0F);
  const c10::weak_intrusive_ptr<c10::StorageImpl> storage = tensor.storage().getWeakStorageImpl();
  const EffectsUndone undone(cpu, {});
  tensor.add_(1);
  tensor.reset();
  EXPECT_TRUE(storage.expired());
}

TEST(EffectsUndoneTest, LeavesWhatTheRunMade) {
  at::Tensor made;
  {
    const EffectsUndone undone(cpu, {});
    made = at::arange(8.0F);
    made.add_(1);
  }
  EXPECT_TRUE(at::equal(made, at::arange(8.0F).add(1)));
}

}  // namespace
}  // namespace sidestream
