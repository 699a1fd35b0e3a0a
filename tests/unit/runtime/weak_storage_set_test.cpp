#include "runtime/weak_storage_set.h"

#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

namespace sidestream {
namespace {

TEST(WeakStorageSet, KeepsNoMemoryAndForgetsTheDead) {
  WeakStorageSet set;
  std::vector<at::Tensor> alive;
  for (int i = 0; i < 1000; ++i) {
    alive.push_back(at::ones({1}));
    set.insert(alive.back().storage());
    if (alive.size() > 10) {
      alive.erase(alive.begin());
    }
    EXPECT_LE(set.size(), 64U);
  }
  for (const at::Tensor& tensor : alive) {
    EXPECT_TRUE(set.contains(tensor.storage().unsafeGetStorageImpl()));
  }
  set.sweep();
  EXPECT_EQ(set.size(), 10U);
  set.insert(alive.front().storage());
  EXPECT_EQ(set.size(), 10U);
}

TEST(WeakStorageSet, GrowsWithTheLiving) {
  WeakStorageSet set;
  std::vector<at::Tensor> alive;
  for (int i = 0; i < 1000; ++i) {
    alive.push_back(at::ones({1}));
    set.insert(alive.back().storage());
  }
  EXPECT_EQ(set.size(), 1000U);
}

TEST(WeakStorageSet, ADeadMembersAddressIsNotGivenToAnotherStorage) {
  WeakStorageSet set;
  for (int i = 0; i < 50; ++i) {
    set.insert(at::ones({1}).storage());
    EXPECT_FALSE(set.contains(at::ones({1}).storage().unsafeGetStorageImpl()));
  }
}

}  // namespace
}  // namespace sidestream
