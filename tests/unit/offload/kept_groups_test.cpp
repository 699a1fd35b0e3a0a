// Steps in which some groups stay on the device: those that are offloaded come back no earlier for that.
#include <algorithm>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "unit/offload/groups_by_hand.h"

namespace sidestream {
namespace {

/// Room on the host for eight storages, a lag of one.
class KeptGroupsTest : public GroupsByHand {
 protected:
  static constexpr std::size_t kGroups = 8;

  KeptGroupsTest() : GroupsByHand(CopyLimits{}) {}
  void SetUp() override {
    pin(std::vector<std::size_t>(kGroups, kBytes));
    offload_->set_window({kBytes, 0, 8});
  }
  /// One step whose groups with an odd number stay, if `half`: the backward uses all in reverse. After each use: how many groups have been
  /// reloaded, or are on their way, and are not used yet.
  std::vector<std::size_t> unused_after_each_use(bool half) {
    std::vector<Group> groups(kGroups);
    std::vector<std::shared_ptr<SavedStorage>> saved;
    offload_->begin_step();
    for (std::size_t i = 0; i < kGroups; ++i) {
      if (half && i % 2 == 1) {
        groups[i].scope = tree_.child(tree_.root(), "group");
        const at::Tensor tensor = filled(static_cast<float>(i));
        saved.push_back(std::make_shared<SavedStorage>(offload_, &groups[i], tensor.storage()));
        groups[i].storages.push_back(saved.back());
        offload_->group_ended(groups[i]);
      } else {
        saved.push_back(end_group(groups[i], static_cast<float>(i)));
      }
    }
    std::vector<std::size_t> unused;
    while (!saved.empty()) {
      EXPECT_EQ(doubled(*saved.back())[0].item<float>(), 2.0F * static_cast<float>(saved.size() - 1));
      saved.pop_back();
      unused.push_back(0);
      for (const auto& each : saved) {
        unused.back() += each->place == SavedStorage::Place::reloading ? 1 : 0;
      }
    }
    offload_->end_step();
    return unused;
  }
};

// Upstream each backward of a group begins a reload, also that of a group that stays: all offloaded groups are on the device at once.
TEST_F(KeptGroupsTest, AReloadIsOneGroupAheadWhetherOthersStayOrNot) {
  for (const bool half : {false, true}) {
    for (int step = 0; step < 3; ++step) {  // the later ones know the order
      const testing::ScopedTrace at(__FILE__, __LINE__, (half ? "half, step " : "all, step ") + std::to_string(step));
      std::size_t most = 0;
      for (const std::size_t unused : unused_after_each_use(half)) {
        most = std::max(most, unused);
      }
      EXPECT_EQ(most, 1U);
    }
  }
}

}  // namespace
}  // namespace sidestream
