#include "graphs/sequence/pool_use.h"

#include <exception>
#include <utility>

namespace sidestream {

PoolUse::PoolUse(std::shared_ptr<Runtime> runtime, const MemoryPool& pool, const std::vector<GraphUse>& graphs,
                 std::int64_t ungiven)
    : runtime_(std::move(runtime)), pool_(pool), memory_(LiveMemory::of(runtime_->device())), graphs_(graphs) {
  idle(ungiven);
}

PoolUse::~PoolUse() { idle(); }

void PoolUse::launched(std::size_t graph_index) {
  if (allocated_ < 0) {  // not after the last capture: autograd's thread frees its tensors a moment later
    allocated_ = runtime_->allocated_in(pool_);
  }
  const GraphUse& use = graphs_[graph_index];
  const LiveMemory::Change during{use.peak - allocated_ - hidden_, use.in_flight - in_flight_};
  const LiveMemory::Change after{use.after - allocated_ - hidden_, use.in_flight_after - in_flight_};
  hidden_ += after.hidden;
  in_flight_ += after.in_flight;
  memory_.launched(*runtime_, during, after);
}

void PoolUse::idle(std::int64_t ungiven) noexcept {
  const LiveMemory::Change back{-ungiven - std::exchange(hidden_, -ungiven), -std::exchange(in_flight_, 0)};
  try {
    memory_.change(*runtime_, back);
  } catch (const std::exception&) {  // the device has failed: no measurement follows
  }
}

void PoolUse::dropped() noexcept {
  idle();
  allocated_ = -1;
}

void PoolUse::Measurement::comes_to(std::size_t graph_index) {
  if (!graphs_.empty()) {
    graphs_.back().after = runtime_.allocated_in(pool_);
  }
  graphs_.resize(graph_index + 1);
}

void PoolUse::Measurement::capture_begins() {
  pool_before_ = runtime_.allocated_in(pool_);
  device_before_ = LiveMemory::of(runtime_.device()).use(runtime_).live;
  measurement_.emplace(runtime_);
}

void PoolUse::Measurement::capture_ended() {
  graphs_.back().peak = pool_before_ + measurement_->peak().live - device_before_;
  measurement_.reset();
}

std::vector<PoolUse::GraphUse> PoolUse::Measurement::finish(std::size_t graphs) {
  comes_to(graphs);
  graphs_.pop_back();
  return std::move(graphs_);
}

}  // namespace sidestream
