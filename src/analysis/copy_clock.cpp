#include "analysis/copy_clock.h"

#include <algorithm>

namespace sidestream {

CopyClock::CopyClock(const SequenceOrder& order, const std::vector<std::uint64_t>& offloaded,
                     const std::vector<CopyPlaces>& places, const LinkPace& link)
    : order_(order),
      offloaded_(offloaded),
      places_(places),
      link_(link),
      offloads_(order.runs()),
      reloads_(order.runs()) {}

void CopyClock::wait_until(double time) { now_ = std::max(now_, time); }

// Runs are reloaded in the order of their backwards: see copy_places.
void CopyClock::begin_reloads(std::size_t graph_index) {
  for (; reloaded_ < order_.runs(); ++reloaded_) {
    const std::size_t run = order_.by_backward()[reloaded_];
    if (places_[run].reload_at > graph_index) {
      return;
    }
    if (offloaded_[run] > 0) {
      const double begin = std::max(to_device_free_, now_);
      to_device_free_ = begin + static_cast<double>(offloaded_[run]) / link_.to_device;
      reloads_[run] = {begin, to_device_free_};
    }
  }
}

TimeSpan CopyClock::run_graph(double seconds) {
  const std::size_t i = next_++;
  const std::size_t run = order_.run_at(i);
  for (; released_ < order_.runs() && places_[released_].released_at <= i; ++released_) {
    wait_until(offloads_[released_].end);
  }
  begin_reloads(i);
  if (order_.is_backward(i)) {
    wait_until(reloads_[run].end);
  } else if (offloaded_[run] > 0) {
    // The groups of a call end all along its forward, the last one with it.
    const double begin = std::max(to_host_free_, now_);
    to_host_free_ = std::max(begin + static_cast<double>(offloaded_[run]) / link_.to_host, now_ + seconds);
    offloads_[run] = {begin, to_host_free_};
  }
  const double begin = now_;
  now_ += seconds;
  return {begin, now_};
}

}  // namespace sidestream
