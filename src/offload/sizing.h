#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
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

/// Offloads nothing: the sizing pass, warm-up.
class SizingMover final : public StorageMover {
 public:
  /// `backward_begins` is called once, when backward asks for the first storage.
  explicit SizingMover(std::function<void()> backward_begins = {}) : backward_begins_(std::move(backward_begins)) {}

  void group_ended(Group& group) override { immediate_.ended(group); }
  c10::Storage fetch(SavedStorage& storage) override {
    if (!begun_.exchange(true) && backward_begins_) {
      backward_begins_();
    }
    immediate_.asked();
    return storage.device;
  }
  void dropped(SavedStorage& /*storage*/) noexcept override {}

  /// Whose pass it was looks no more: a backward that begins after this is not told to it.
  void pass_ended() noexcept { begun_ = true; }

  /// See ImmediateNeeds.
  [[nodiscard]] const std::vector<std::uint32_t>& needed_immediately() const noexcept { return immediate_.groups(); }

 private:
  std::function<void()> backward_begins_;
  std::atomic<bool> begun_{false};
  ImmediateNeeds immediate_;
};

}  // namespace sidestream
