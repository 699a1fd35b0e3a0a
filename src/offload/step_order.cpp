#include "offload/step_order.h"

#include <optional>
#include <utility>

namespace sidestream {

void StepOrder::forget() noexcept {
  learned_.clear();
  reloads_.clear();
}

void StepOrder::begin() noexcept {
  step_.clear();
  next_reload_ = 0;
  in_step_ = true;
  follows_ = !learned_.events.empty();
}

void StepOrder::expect(const std::vector<PipelineStep>* order, const CopyWindow& window) {
  if (order == nullptr) {
    order_.clear();
    return;
  }
  if (*order == order_) {
    return;
  }
  if (std::optional<StepGroups> expected = groups_of_order(*order, learned_); follows_ && expected) {
    learned_ = std::move(*expected);
    reloads_ = group_reloads(learned_.events, learned_.bytes, window);
    follows_ = !learned_.events.empty();
  }
  order_ = *order;
}

void StepOrder::ended(GroupBytes bytes) {
  const auto group = static_cast<std::uint32_t>(step_.bytes.size());
  step_.bytes.push_back(bytes);
  step_.chunks.push_back(chunk_);
  happened({group, GroupEvent::Kind::ended});
}

void StepOrder::happened(GroupEvent event) {
  if (!in_step_) {
    follows_ = false;
    return;
  }
  const std::size_t place = step_.events.size();
  step_.events.push_back(event);
  follows_ = follows_ && place < learned_.events.size() && learned_.events[place] == event;
}

const GroupReload* StepOrder::due() noexcept {
  if (!follows_ || next_reload_ == reloads_.size() || reloads_[next_reload_].event >= step_.events.size()) {
    return nullptr;
  }
  return &reloads_[next_reload_++];
}

void StepOrder::end(const CopyWindow& window) {
  in_step_ = follows_ = false;
  if (step_ == learned_) {
    return;
  }
  learned_ = step_;
  reloads_ = group_reloads(learned_.events, learned_.bytes, window);
}

}  // namespace sidestream
