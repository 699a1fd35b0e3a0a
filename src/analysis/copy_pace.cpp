#include "analysis/copy_pace.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace sidestream {
namespace {

/// What layers wait for copies is none of a step's time if it is less than this part of it.
constexpr double kNothing = 0.002;
constexpr double kLittle = 0.1;
constexpr double kLinkInUse = 0.9;  // what a link carries of its rate, between one copy and the next, beside compute
constexpr std::uint64_t kLagAtMost = 2;        // one part in so many of all bytes
constexpr std::uint64_t kLookaheadAtMost = 8;  // likewise

struct Pass {
  double forward = 0;
  double all = 0;
};

Pass simulate(const std::vector<std::uint64_t>& bytes, const std::vector<std::uint64_t>& leaving,
              const CopyWindow& window, const std::vector<LayerPace>& layers, const LinkPace& link) {
  const std::vector<CopyPlaces> places = copy_places(bytes, leaving, window);
  const std::size_t count = bytes.size();
  std::vector<double> left(count);
  double now = 0;
  double link_free = 0;
  const auto wait_for_sources = [&](std::size_t place) {
    for (std::size_t i = 0; i < count; ++i) {
      if (leaving[i] > 0 && places[i].released_at == place) {
        now = std::max(now, left[i]);
      }
    }
  };
  for (std::size_t i = 0; i < count; ++i) {
    wait_for_sources(i);
    // The groups of a layer end all along its forward, the last one with it.
    link_free = std::max(link_free, now) + static_cast<double>(leaving[i]) / link.to_host;
    now += layers[i].forward;
    left[i] = link_free = leaving[i] > 0 ? std::max(link_free, now) : link_free;
  }
  Pass pass{now, 0};
  std::vector<double> back(count);
  link_free = 0;
  for (std::size_t i = count; i-- > 0;) {
    const std::size_t place = 2 * count - 1 - i;
    wait_for_sources(place);
    for (std::size_t k = count; k-- > 0;) {
      if (leaving[k] > 0 && places[k].returns_at == place) {
        link_free = std::max(link_free, now) + static_cast<double>(leaving[k]) / link.to_device;
        back[k] = link_free;
      }
    }
    now = std::max(now, back[i]) + layers[i].backward;
  }
  pass.all = now;
  return pass;
}

std::vector<std::uint64_t> leaving_of(const std::vector<std::uint64_t>& bytes, const CopyWindow& window) {
  std::vector<std::uint64_t> leaving = bytes;
  std::fill(leaving.begin() + static_cast<std::ptrdiff_t>(first_to_stay(bytes, window)), leaving.end(), 0);
  return leaving;
}

}  // namespace

double pass_seconds(const std::vector<std::uint64_t>& bytes, const std::vector<std::uint64_t>& leaving,
                    const CopyWindow& window, const std::vector<LayerPace>& layers, const LinkPace& link) {
  return simulate(bytes, leaving, window, layers, link).all;
}

CopyWindow paced_window(const std::vector<std::uint64_t>& bytes, const CopyWindow& least,
                        const std::vector<LayerPace>& layers, const LinkPace& link) {
  const std::uint64_t all = std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0});
  const std::uint64_t largest = bytes.empty() ? 0 : *std::max_element(bytes.begin(), bytes.end());
  if (largest == 0) {
    return least;
  }
  const LinkPace in_use{kLinkInUse * link.to_host, kLinkInUse * link.to_device};
  const auto pass = [&](const CopyWindow& window) {
    return simulate(bytes, leaving_of(bytes, window), window, layers, in_use);
  };
  double forward = 0;
  for (const LayerPace& layer : layers) {
    forward += layer.forward;
  }
  const CopyWindow half{std::max(least.lag, all / kLagAtMost), least.lookahead};
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
