#include "offload/step_order.h"

namespace sidestream {

void StepOrder::forget() noexcept {
  learned_.clear();
  learned_bytes_.clear();
  returns_.clear();
}

void StepOrder::begin() noexcept {
  events_.clear();
  bytes_.clear();
  next_return_ = 0;
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

const GroupReturn* StepOrder::due() noexcept {
  if (!follows_ || next_return_ == returns_.size() || returns_[next_return_].event >= events_.size()) {
    return nullptr;
  }
  return &returns_[next_return_++];
}

void StepOrder::end(const GroupWindow& window) {
  in_step_ = follows_ = false;
  if (events_ == learned_ && bytes_ == learned_bytes_) {
    return;
  }
  learned_ = events_;
  learned_bytes_ = bytes_;
  returns_ = group_returns(learned_, learned_bytes_, window);
}

}  // namespace sidestream
