#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "offload/saved_storage.h"

namespace sidestream {

/// Offloads nothing: the sizing pass, warm-up. Sees which group backward needs immediately: the last selected one that ended
/// before it asks for a storage.
class SizingMover final : public StorageMover {
 public:
  /// `backward_begins` is called once, when backward asks for the first storage.
  explicit SizingMover(std::function<void()> backward_begins = {}) : backward_begins_(std::move(backward_begins)) {}

  void group_ended(Group& group) override {
    if (group.scope->selected) {
      last_ended_ = group.index;
    }
  }
  c10::Storage fetch(SavedStorage& storage) override {
    if (!begun_.exchange(true) && backward_begins_) {
      backward_begins_();
    }
    if (const std::int64_t turning = last_ended_.exchange(-1); turning >= 0) {
      needed_immediately_.push_back(static_cast<std::uint32_t>(turning));
    }
    return storage.device;
  }
  void dropped(SavedStorage& /*storage*/) noexcept override {}

  /// Whose pass it was looks no more: a backward that begins after this is not told to it.
  void pass_ended() noexcept { begun_ = true; }

  /// Indices of groups. Read it after the pass.
  [[nodiscard]] const std::vector<std::uint32_t>& needed_immediately() const noexcept { return needed_immediately_; }

 private:
  std::function<void()> backward_begins_;
  std::atomic<bool> begun_{false};
  std::atomic<std::int64_t> last_ended_{-1};
  std::vector<std::uint32_t> needed_immediately_;
};

}  // namespace sidestream
