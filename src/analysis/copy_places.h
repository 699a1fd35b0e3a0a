#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "analysis/sequence_order.h"

namespace sidestream {

/// How far copies may be away from the calls or eager groups that they belong to.
struct CopyWindow {
  /// How far copies to the host may trail: the saved device bytes of calls or groups whose copies have not been waited for, and of the call
  /// that runs. Bytes that are needed immediately, within it, are not offloaded.
  std::uint64_t lag = 0;
  /// Bytes that may be reloaded before their backward, beyond the memory of `lag` that backwards have freed by then.
  std::uint64_t lookahead = 0;
  /// How many calls or groups may trail, in addition to the bound in bytes.
  std::size_t in_flight = std::numeric_limits<std::size_t>::max();

  /// Lag and lookahead together: what may be on the device while backwards run.
  [[nodiscard]] std::uint64_t room() const noexcept {
    constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
    return lookahead > most - lag ? most : lag + lookahead;
  }

  friend bool operator==(const CopyWindow&, const CopyWindow&) = default;
};

/// Which runs of a sequence are not offloaded, because their backward needs what they saved immediately: all that is saved from a run's
/// forward until its backward begins fits into the lag. `bytes` by run. Pure.
[[nodiscard]] std::vector<bool> needed_immediately(const SequenceOrder& order, const std::vector<std::uint64_t>& bytes,
                                                   const CopyWindow& window);

/// Between which graphs the copies of one run lie, as graph indices. See CapturedCall::Copies.
struct CopyPlaces {
  std::size_t released_at = 0;
  std::size_t reload_at = 0;
};

/// By run, for runs that save `bytes` and offload `offloaded` of them. The sources of a run are released as late as lag and `in_flight`
/// allow, and before its targets are allocated. The targets are allocated at a backward: as early as lag and lookahead allow, beside what
/// is not released yet, and at the latest one backward before the run's own. If there is none, or if the run's forward comes between the
/// two, they are allocated up to two forwards before its backward, as soon as it is released and if no more memory is needed for that, or
/// with its backward. Pure.
[[nodiscard]] std::vector<CopyPlaces> copy_places(const SequenceOrder& order, const std::vector<std::uint64_t>& bytes,
                                                  const std::vector<std::uint64_t>& offloaded,
                                                  const CopyWindow& window);

/// By run, the earlier run whose place on the host it takes over, or itself: two runs may have the same place if their `kinds` are equal
/// and if one's backward comes before the other's forward. Of runs that are reloaded `for_weights`, also one's weights graph has to. Pure.
[[nodiscard]] std::vector<std::size_t> former_runs(const SequenceOrder& order, const std::vector<std::size_t>& kinds,
                                                   const std::vector<bool>& for_weights);

}  // namespace sidestream
