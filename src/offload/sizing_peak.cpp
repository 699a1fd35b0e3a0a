#include "offload/sizing_peak.h"

#include <algorithm>

#include "offload/saved_storage.h"

namespace sidestream {
SizingPeak::SizingPeak(Runtime& runtime) : runtime_(&runtime), step_(runtime), since_look_(std::in_place, runtime) {}

void SizingPeak::released(const std::shared_ptr<SavedStorage>& saved) {
  released_.push_back({saved, saved->device.getWeakStorageImpl()});
}

std::int64_t SizingPeak::count() {
  std::int64_t away = 0;
  std::erase_if(released_, [&](const Released& released) {
    const auto saved = released.saved.lock();
    if (saved == nullptr) {
      return true;
    }
    const bool on_device = saved->place != SavedStorage::Place::host;
    const bool in_program = !released.memory.expired();
    if (on_device && in_program) {  // without offload it would be there once
      away -= allocated_bytes(saved->bytes);
    } else if (!on_device && !in_program) {
      away += allocated_bytes(saved->bytes);
    }
    return false;
  });
  return away;
}

void SizingPeak::look(std::int64_t only_copies) {
  const std::int64_t away = count() - only_copies;
  without_offload_ = std::max(without_offload_, since_look_->peak().live + std::min(away, away_));
  away_ = away;
  since_look_.emplace(*runtime_);
}

std::int64_t SizingPeak::without_offload() {
  return std::max(without_offload_, since_look_->peak().live + std::min<std::int64_t>(away_, 0));
}

}  // namespace sidestream
