#pragma once
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "sidestream/journal.h"
#include "sim/rerun/recording.h"

namespace sidestream::sim {

/// A recording in the order checker's words.
class RecordingJournal {
 public:
  /// `works` must outlive it.
  explicit RecordingJournal(const std::vector<RecordedWork>& works);

  [[nodiscard]] const Journal& journal() const noexcept { return journal_; }

  /// The pieces of work, earlier one first, of each pair that nothing orders; like pairs once.
  [[nodiscard]] std::vector<std::pair<std::uint32_t, std::uint32_t>> unordered() const;
  /// Two pieces of work, what they both touch, and the edge that would fix it.
  [[nodiscard]] std::string describe_pair(std::uint32_t first, std::uint32_t second) const;

 private:
  const std::vector<RecordedWork>& works_;
  Journal journal_;
  std::vector<std::uint32_t> operation_of_;  ///< the operation that stands for each piece of work
  std::vector<std::uint32_t> work_of_;       ///< the piece of work that each operation belongs to
};

}  // namespace sidestream::sim
