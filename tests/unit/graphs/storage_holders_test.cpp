// Which references to a storage are known, and what follows if others remain.
#include "graphs/outputs/storage_holders.h"

#include <memory>
#include <optional>
#include <vector>

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "offload/saved_storage.h"
#include "sidestream/device.h"

namespace sidestream {
namespace {

class NoMover final : public StorageMover {
  void group_ended(Group& /*group*/) override {}
  c10::Storage fetch(SavedStorage& storage) override { return storage.device; }
  void dropped(SavedStorage& /*storage*/) noexcept override {}
};

class StorageHoldersTest : public testing::Test {
 protected:
  StorageHoldersTest() {
    holders_.add([this](KnownReferences& references) {
      for (const at::Tensor& tensor : tensors_) {
        references.add(tensor);
      }
    });
    holders_.add([this](KnownReferences& references) {
      for (const auto& saved : saved_) {
        references.add(*saved);
      }
    });
    holders_.add([this](KnownReferences& references) {
      for (const c10::Storage& storage : storages_) {
        references.add(storage);
      }
    });
  }
  [[nodiscard]] bool others_hold() const { return holders_.others_hold(*storage_); }
  [[nodiscard]] at::Tensor make() {
    at::Tensor made = at::ones({4, 4}, device_);
    storage_ = made.storage().getWeakStorageImpl();
    return made;
  }
  [[nodiscard]] std::shared_ptr<SavedStorage> save(const at::Tensor& tensor) const {
    return std::make_shared<SavedStorage>(mover_, nullptr, tensor.storage());
  }

  c10::Device device_ = find_device("sim");
  std::shared_ptr<StorageMover> mover_ = std::make_shared<NoMover>();
  StorageHolders holders_;
  std::vector<at::Tensor> tensors_;
  std::vector<std::shared_ptr<SavedStorage>> saved_;
  std::vector<c10::Storage> storages_;
  std::optional<WeakStorage> storage_;
};

TEST_F(StorageHoldersTest, WhatRegisteredHoldersHaveIsKnown) {
  tensors_ = {make(), at::ones({2}, device_), at::Tensor()};
  tensors_.push_back(tensors_[0].detach());
  storages_ = {tensors_[0].storage(), tensors_[1].storage()};
  saved_ = {save(tensors_[0])};
  EXPECT_FALSE(others_hold());
  at::Tensor kept = tensors_[0].detach();
  EXPECT_TRUE(others_hold());
  kept = at::Tensor();
  EXPECT_FALSE(others_hold());
  tensors_.clear();
  EXPECT_FALSE(others_hold()) << "the storage and what was saved";
}

TEST_F(StorageHoldersTest, WhatHoldersShareCountsOnce) {
  tensors_ = {make()};
  tensors_.push_back(tensors_[0]);
  saved_ = {save(tensors_[0])};
  saved_.push_back(saved_[0]);
  EXPECT_FALSE(others_hold());
  const c10::Storage kept = tensors_[0].storage();
  EXPECT_TRUE(others_hold());
}

TEST_F(StorageHoldersTest, AViewHoldsItsBase) {
  tensors_ = {make().view({16})};
  ASSERT_TRUE(tensors_[0].is_view());
  EXPECT_FALSE(others_hold());
}

TEST_F(StorageHoldersTest, AHolderThatClaimsTooMuchKeepsTheMemory) {
  tensors_ = {make()};
  bool wrong = false;
  holders_.add([&](KnownReferences& references) {
    if (wrong) {
      references.add(tensors_[0].storage());
    }
  });
  EXPECT_FALSE(others_hold());
  wrong = true;
  EXPECT_TRUE(others_hold());
}

}  // namespace
}  // namespace sidestream
