#include "graphs/capture/captured_use.h"

#include <utility>

namespace sidestream {

void CapturedUse::comes_to(std::size_t place) {
  if (!places_.empty()) {
    places_.back().after = runtime_.allocated_in(pool_);
  }
  places_.resize(place + 1);
}

void CapturedUse::capture_begins() {
  pool_before_ = runtime_.allocated_in(pool_);
  device_before_ = LiveMemory::of(runtime_.device()).use(runtime_).live;
  measurement_.emplace(runtime_);
}

void CapturedUse::capture_ended() {
  places_.back().peak = pool_before_ + measurement_->peak().live - device_before_;
  measurement_.reset();
}

std::vector<PoolUse::Place> CapturedUse::finish(const CapturedCalls& calls) {
  const std::size_t graphs = 2 * calls.size();
  comes_to(graphs);
  places_.pop_back();
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const CallCopies& copies = calls[i].copies;
    const auto bytes = static_cast<std::int64_t>(copies.captured.bytes);
    if (bytes == 0) {
      continue;
    }
    const std::size_t backward = graphs - 1 - i;
    for (std::size_t place = i; place < backward; ++place) {
      const bool here = place < copies.released_at || place >= copies.returns_at;
      places_[place].in_flight += here && place > i ? bytes : 0;
      places_[place].in_flight_after += here ? bytes : 0;
    }
  }
  return std::move(places_);
}

}  // namespace sidestream
