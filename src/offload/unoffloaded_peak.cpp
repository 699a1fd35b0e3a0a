#include "offload/unoffloaded_peak.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "offload/saved_storage.h"

namespace sidestream {
namespace {

/// LibTorch's allocators count in multiples of this.
constexpr std::size_t kBlock = 512;

}  // namespace

UnoffloadedPeak::UnoffloadedPeak(Runtime& runtime)
    : runtime_(&runtime), memory_(LiveMemory::of(runtime.device())), measurement_(runtime) {}

UnoffloadedPeak::~UnoffloadedPeak() {
  try {
    change(-away_);
  } catch (const std::exception&) {  // the device has failed: no measurement follows
  }
}

void UnoffloadedPeak::change(std::int64_t by) {
  away_ += by;
  memory_.change(*runtime_, {.away = by});
}

void UnoffloadedPeak::gathered(const SavedStorage& block) {
  const auto bytes = static_cast<std::int64_t>(block.bytes);  // of whole kBlocks
  sources_.insert_or_assign(&block, Source{block.device.getWeakStorageImpl(), bytes, false, true});
  away_ -= bytes;
  memory_.came_back(*runtime_, bytes);
}

void UnoffloadedPeak::lets_go(const SavedStorage& saved) {
  if (saved.is_block) {
    if (const auto found = sources_.find(&saved); found != sources_.end()) {
      found->second.storage = saved.device.getWeakStorageImpl();
      held_.push_back(&saved);
    }
    return;
  }
  const auto blocks = (saved.bytes + kBlock - 1) / kBlock;
  sources_.insert_or_assign(&saved,
                            Source{saved.device.getWeakStorageImpl(), static_cast<std::int64_t>(blocks * kBlock)});
  held_.push_back(&saved);
}

void UnoffloadedPeak::look(std::int64_t only_copies) {
  std::int64_t gone = 0;
  const auto is_gone = [&](const SavedStorage* saved) {
    const auto found = sources_.find(saved);
    if (found == sources_.end()) {
      return true;
    }
    Source& source = found->second;
    source.gone = source.storage.expired();
    gone += source.gone ? source.bytes : 0;
    return source.gone;
  };
  held_.erase(std::remove_if(held_.begin(), held_.end(), is_gone), held_.end());
  const std::int64_t by = gone - only_copies + std::exchange(only_copies_, only_copies);
  if (by != 0) {
    change(by);
  }
}

void UnoffloadedPeak::came_back(const SavedStorage& saved) {
  const auto found = sources_.find(&saved);
  // What is in place of nothing, a block on the device, counts as back; while it is away, as gone besides.
  if (found == sources_.end() ||
      (found->second.back && !(saved.is_block && std::exchange(found->second.gone, false)))) {
    return;
  }
  found->second.back = true;
  away_ -= found->second.bytes;
  memory_.came_back(*runtime_, found->second.bytes);
}

void UnoffloadedPeak::dropped(const SavedStorage& saved) {
  const auto found = sources_.find(&saved);
  if (found == sources_.end()) {
    return;
  }
  const Source source = found->second;
  held_.erase(std::remove(held_.begin(), held_.end(), &saved), held_.end());
  sources_.erase(found);
  if (const std::int64_t share = (source.gone ? source.bytes : 0) - (source.back ? source.bytes : 0); share != 0) {
    change(-share);
  }
}

}  // namespace sidestream
