#include "analysis/copy_places.h"

#include <algorithm>
#include <functional>
#include <numeric>

namespace sidestream {

CopyWindow copy_window(const std::vector<std::uint64_t>& bytes, std::optional<std::uint64_t> lag,
                       std::uint64_t lookahead, std::size_t layers_deep) {
  std::vector<std::uint64_t> largest = bytes;
  std::sort(largest.begin(), largest.end(), std::greater<>());
  const std::uint64_t least = largest.empty() ? 0 : largest.front();
  largest.resize(std::min(largest.size(), layers_deep));
  const std::uint64_t deep = std::accumulate(largest.begin(), largest.end(), std::uint64_t{0});
  return {std::max(least, lag.value_or(deep)), lookahead};
}

std::size_t first_to_stay(const std::vector<std::uint64_t>& bytes, const CopyWindow& window) {
  std::size_t first = bytes.size();
  std::uint64_t held = 0;
  while (first > 0 && held + bytes[first - 1] <= window.lag) {
    held += bytes[--first];
  }
  return first;
}

std::vector<CopyPlaces> copy_places(const std::vector<std::uint64_t>& bytes, const std::vector<std::uint64_t>& leaving,
                                    const CopyWindow& window) {
  const std::size_t layers = bytes.size();
  std::vector<CopyPlaces> places(layers);
  std::uint64_t held = 0;
  std::size_t oldest = 0;  // that was not released
  for (std::size_t layer = 0; layer < layers; ++layer) {
    for (; oldest < layer && held + bytes[layer] > window.lag; ++oldest) {
      places[oldest].released_at = layer;
      held -= leaving[oldest];
    }
    held += bytes[layer];
  }
  for (; oldest < layers; ++oldest) {
    places[oldest].released_at = layers;
  }

  std::vector<std::uint64_t> on_device(layers);
  for (std::size_t layer = 0; layer < layers; ++layer) {
    on_device[layer] = bytes[layer] - leaving[layer];
  }
  std::uint64_t below = std::accumulate(on_device.begin(), on_device.end(), std::uint64_t{0});  // and the layer itself
  std::size_t next = layers;  // layers from here on are here
  for (std::size_t layer = layers; layer-- > 0;) {
    const std::size_t place = 2 * layers - 1 - layer;
    while (next > 0) {
      const std::size_t candidate = next - 1;
      const bool due = candidate + 1 >= layer;
      if (!due && below + leaving[candidate] > window.lag + window.lookahead) {
        break;
      }
      places[candidate].returns_at = place;
      below += leaving[candidate];
      next = candidate;
    }
    below -= bytes[layer];
  }
  return places;
}

}  // namespace sidestream
