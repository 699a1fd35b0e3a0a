#include "graphs/capture/captured_use.h"

#include <utility>

namespace sidestream {

void CapturedUse::comes_to(std::size_t graph_index) {
  if (!graphs_.empty()) {
    graphs_.back().after = runtime_.allocated_in(pool_);
  }
  graphs_.resize(graph_index + 1);
}

void CapturedUse::capture_begins() {
  pool_before_ = runtime_.allocated_in(pool_);
  device_before_ = LiveMemory::of(runtime_.device()).use(runtime_).live;
  measurement_.emplace(runtime_);
}

void CapturedUse::capture_ended() {
  graphs_.back().peak = pool_before_ + measurement_->peak().live - device_before_;
  measurement_.reset();
}

std::vector<PoolUse::GraphUse> CapturedUse::finish(const CapturedCalls& calls, const SequenceOrder& order) {
  comes_to(order.size());
  graphs_.pop_back();
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const CallCopies& copies = calls[i].copies;
    const auto bytes = static_cast<std::int64_t>(copies.captured.bytes);
    if (bytes == 0) {
      continue;
    }
    const std::size_t forward = order.forward_index(i);
    for (std::size_t graph_index = forward; graph_index < order.backward_index(i); ++graph_index) {
      const bool here = graph_index < copies.released_at || graph_index >= copies.reload_at;
      graphs_[graph_index].in_flight += here && graph_index > forward ? bytes : 0;
      graphs_[graph_index].in_flight_after += here ? bytes : 0;
    }
  }
  return std::move(graphs_);
}

}  // namespace sidestream
