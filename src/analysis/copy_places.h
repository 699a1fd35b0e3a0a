#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace sidestream {

/// How far copies may be away from the graphs that they belong to, in device bytes.
struct CopyWindow {
  /// How far copies to the host may trail: what the layers saved whose copies are not waited for yet, with that of the layer
  /// that runs. What turns round within it does not leave.
  std::uint64_t lag = 0;
  /// What may be back before its backward, beyond the memory of `lag` that backwards have freed by then.
  std::uint64_t lookahead = 0;

  friend bool operator==(const CopyWindow&, const CopyWindow&) = default;
};

/// The window for layers that save `bytes` (what the options select of each, in order): as given, but never less than the largest
/// layer. Without `lag`: room for the `layers_deep` largest. Pure.
[[nodiscard]] CopyWindow copy_window(const std::vector<std::uint64_t>& bytes, std::optional<std::uint64_t> lag,
                                     std::uint64_t lookahead, std::size_t layers_deep);

/// The first of the last layers, which stay: those that turn round within the lag. Pure.
[[nodiscard]] std::size_t first_to_stay(const std::vector<std::uint64_t>& bytes, const CopyWindow& window);

/// Where the copies of one layer lie among a chain's graphs; see LayerCopies.
struct CopyPlaces {
  std::size_t released_at = 0;
  std::size_t returns_at = 0;
};

/// The places of layers that save `bytes` and of which `leaving` bytes leave. A source is released as late as the lag allows, and
/// before the first backward; a target is allocated as early as lag and lookahead allow, and with the backward of the layer above
/// at the latest (its own, for the last layer). Pure.
[[nodiscard]] std::vector<CopyPlaces> copy_places(const std::vector<std::uint64_t>& bytes,
                                                  const std::vector<std::uint64_t>& leaving, const CopyWindow& window);

}  // namespace sidestream
