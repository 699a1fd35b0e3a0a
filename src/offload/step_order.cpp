#include "offload/step_order.h"

namespace sidestream {

void StepOrder::forget() noexcept {
  learned_.clear();
  learned_bytes_.clear();
  reloads_.clear();
}

void StepOrder::begin() noexcept {
  events_.clear();
  bytes_.clear();
  next_reload_ = 0;
  in_step_ = true;
  follows_ = !learned_.empty();
}

void StepOrder::ended(GroupBytes bytes) {
  const auto group = static_cast<std::uint32_t>(bytes_.size());
  bytes_.push_back(bytes);
  happened({group, GroupEvent::Kind::ended});
}

void StepOrder::happened(GroupEvent event) {
  if (!in_step_) {
    follows_ = false;
    return;
  }
  const std::size_t place = events_.size();
  events_.push_back(event);
  follows_ = follows_ && place < learned_.size() && learned_[place] == event;
}

const GroupReload* StepOrder::due() noexcept {
  if (!follows_ || next_reload_ == reloads_.size() || reloads_[next_reload_].event >= events_.size()) {
    return nullptr;
  }
  return &reloads_[next_reload_++];
}

void StepOrder::end(const GroupWindow& window) {
  in_step_ = follows_ = false;
  if (events_ == learned_ && bytes_ == learned_bytes_) {
    return;
  }
  learned_ = events_;
  learned_bytes_ = bytes_;
  reloads_ = group_reloads(learned_, learned_bytes_, window);
}

}  // namespace sidestream
