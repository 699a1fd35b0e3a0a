#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <gtest/gtest.h>

#include "memory/storage_view.h"
#include "offload/eager_offload.h"
#include "offload/scope_tree.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream {

/// Groups that a test makes itself, and what offloads them.
class GroupsByHand : public testing::Test {
 protected:
  static constexpr std::int64_t kNumel = 1024;
  static constexpr std::size_t kBytes = kNumel * sizeof(float);

  /// Groups named as in `delayed` wait for a graph.
  explicit GroupsByHand(const CopyLimits& limits, NamePatterns delayed = {})
      : offload_(std::make_shared<EagerOffload>(runtime_, mover_, limits)),
        tree_(NamePatterns::parse("**"), std::move(delayed)) {}
  void TearDown() override { runtime_->synchronize_device(); }

  /// Room on the host for storages of these sizes, and no more.
  void pin(const std::vector<std::size_t>& sizes) {
    EXPECT_EQ(arena_->plan(sizes), std::vector<bool>(sizes.size(), true));
    arena_->seal();
  }
  [[nodiscard]] at::Tensor filled(float value) const {
    return at::full({kNumel}, value, c10::TensorOptions().dtype(at::kFloat).device(runtime_->device()));
  }
  /// A group of one storage, `value` everywhere, whose scope has ended.
  std::shared_ptr<SavedStorage> end_group(Group& group, float value, const char* name = "group") {
    group.scope = tree_.child(tree_.root(), name);
    const at::Tensor tensor = filled(value);
    view_ = StorageView::capture(tensor);
    auto saved = std::make_shared<SavedStorage>(offload_, &group, tensor.storage());
    saved->to_offload = true;
    group.storages.push_back(saved);
    offload_->group_ended(group);
    return saved;
  }
  /// What backward computes from it.
  at::Tensor doubled(SavedStorage& saved) { return at::mul(view_.restore(offload_->fetch(saved)), 2); }
  /// `results` are equal to `values` in each order of the recorded work.
  void expect_in_every_order(sim::Recording& recording, const std::vector<at::Tensor>& results,
                             const std::vector<at::Tensor>& values) {
    const auto expected = sim::raw_bytes(values);
    ASSERT_EQ(sim::raw_bytes(results), expected);
    sim::expect_same_in_every_order(recording, results, expected, 100);
    runtime_->synchronize_device();
  }

  std::shared_ptr<Runtime> runtime_ = make_runtime(c10::Device(c10::DeviceType::PrivateUse1, 0));
  std::shared_ptr<HostArena> arena_ = std::make_shared<HostArena>(*runtime_, std::size_t{1} << 20);
  std::shared_ptr<GroupMover> mover_ = std::make_shared<GroupMover>(runtime_, arena_);
  std::shared_ptr<EagerOffload> offload_;
  ScopeTree tree_;
  StorageView view_;  ///< of all storages that `end_group` saves
};

/// A step with room on the host for three storages, and a lag of two.
class GroupsInAStep : public GroupsByHand {
 protected:
  using GroupsByHand::GroupsByHand;
  void SetUp() override {
    pin({kBytes, kBytes, kBytes});
    offload_->set_window({2 * kBytes, 0, 8});
    offload_->begin_step();
  }
  void TearDown() override {
    offload_->end_step();  // what is still on its way holds its storages, and they hold the mover
    GroupsByHand::TearDown();
  }
  [[nodiscard]] std::uint64_t left() const { return mover_->counts().offloaded_bytes; }
};

}  // namespace sidestream
