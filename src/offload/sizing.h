#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include "offload/saved_storage.h"

namespace sidestream {

/// Which groups a backward needs immediately: the last selected one that ended before it asks for a storage, each time that it
/// turns round.
class ImmediateNeeds {
 public:
  void ended(const Group& group) noexcept {
    if (group.scope->selected) {
      last_ended_ = group.index;
    }
  }
  /// Backward asks for a storage.
  void asked() {
    if (const std::int64_t turning = last_ended_.exchange(-1); turning >= 0) {
      groups_.push_back(static_cast<std::uint32_t>(turning));
    }
  }
  void clear() noexcept {
    last_ended_ = -1;
    groups_.clear();
  }
  /// Indices of groups. Read it after the pass.
  [[nodiscard]] const std::vector<std::uint32_t>& groups() const noexcept { return groups_; }

 private:
  std::atomic<std::int64_t> last_ended_{-1};
  std::vector<std::uint32_t> groups_;
};

/// Offloads nothing: the sizing pass of one layer, whose backward follows at once.
class SizingMover final : public StorageMover {
 public:
  void group_ended(Group& /*group*/) override {}
  c10::Storage fetch(SavedStorage& storage) override { return storage.device; }
  void dropped(SavedStorage& /*storage*/) noexcept override {}
};

}  // namespace sidestream
