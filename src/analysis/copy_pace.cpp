#include "analysis/copy_pace.h"

#include <algorithm>
#include <cstddef>

namespace sidestream {
namespace {

/// Waits of layers for copies count as no time if they are less than this part of a step.
constexpr double kNothing = 0.002;
constexpr double kLittle = 0.1;
constexpr double kLinkInUse = 0.9;             // part of a link's rate that copies reach beside compute, gaps included
constexpr std::uint64_t kLagAtMost = 2;        // one part in so many of the bytes that await their backward at once
constexpr std::uint64_t kLookaheadAtMost = 8;  // likewise

struct Pass {
  double forward = 0;  ///< in forwards, with what they waited for
  double all = 0;
};

Pass simulate(const SequenceOrder& order, const std::vector<std::uint64_t>& bytes,
              const std::vector<std::uint64_t>& offloaded, const CopyWindow& window,
              const std::vector<LayerPace>& paces, const LinkPace& link) {
  const std::vector<CopyPlaces> places = copy_places(order, bytes, offloaded, window);
  CopyClock clock(order, offloaded, places, link);
  Pass pass;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const LayerPace& pace = paces[order.run_at(i)];
    const double began = clock.now();
    clock.run_graph(order.is_backward(i) ? pace.backward : pace.forward);
    pass.forward += order.is_backward(i) ? 0 : clock.now() - began;
  }
  pass.all = clock.now();
  return pass;
}

std::vector<std::uint64_t> offloaded_of(const SequenceOrder& order, const std::vector<std::uint64_t>& bytes,
                                        const CopyWindow& window) {
  std::vector<std::uint64_t> offloaded = bytes;
  const std::vector<bool> stay = needed_immediately(order, bytes, window);
  for (std::size_t run = 0; run < offloaded.size(); ++run) {
    offloaded[run] = stay[run] ? 0 : offloaded[run];
  }
  return offloaded;
}

/// The most bytes that await their backward at once.
std::uint64_t most_pending(const SequenceOrder& order, const std::vector<std::uint64_t>& bytes) {
  std::uint64_t pending = 0;
  std::uint64_t most = 0;
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::uint64_t of_run = bytes[order.run_at(i)];
    pending = order.is_backward(i) ? pending - of_run : pending + of_run;
    most = std::max(most, pending);
  }
  return most;
}

}  // namespace

double pass_seconds(const SequenceOrder& order, const std::vector<std::uint64_t>& bytes,
                    const std::vector<std::uint64_t>& offloaded, const CopyWindow& window,
                    const std::vector<LayerPace>& paces, const LinkPace& link) {
  return simulate(order, bytes, offloaded, window, paces, link).all;
}

CopyWindow paced_window(const SequenceOrder& order, const std::vector<std::uint64_t>& bytes, const CopyWindow& least,
                        const std::vector<LayerPace>& paces, const LinkPace& link) {
  const std::uint64_t all = most_pending(order, bytes);
  const std::uint64_t largest = bytes.empty() ? 0 : *std::max_element(bytes.begin(), bytes.end());
  if (largest == 0) {
    return least;
  }
  const LinkPace in_use{kLinkInUse * link.to_host, kLinkInUse * link.to_device};
  const auto pass = [&](const CopyWindow& window) {
    return simulate(order, bytes, offloaded_of(order, bytes, window), window, paces, in_use);
  };
  double forward = 0;
  for (const LayerPace& pace : paces) {
    forward += pace.forward;
  }
  CopyWindow half = least;
  half.lag = std::max(least.lag, all / kLagAtMost);
  const Pass best = pass(half);
  CopyWindow window = least;
  if (best.forward - forward <= kLittle * best.all) {
    while (window.lag < half.lag && pass(window).forward > best.forward + kNothing * forward) {
      window.lag = std::min(window.lag + largest, half.lag);
    }
  }
  CopyWindow most = window;
  most.lookahead = std::max(window.lookahead, all / kLookaheadAtMost);
  const double soonest = pass(most).all;
  while (window.lookahead < most.lookahead && pass(window).all > (1 + kNothing) * soonest) {
    window.lookahead = std::min(window.lookahead + largest, most.lookahead);
  }
  return window;
}

}  // namespace sidestream
