#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Layout.h>

#include "analysis/planner.h"
#include "offload/exclusions.h"

namespace sidestream {

/// Counts the tensors of one pass that stay on the device: by reason, and unsupported ones by layout.
/// Threads: one at a time.
class ExclusionTallies {
 public:
  void count(Exclusion reason, const at::Tensor& tensor) noexcept;
  [[nodiscard]] std::uint64_t bytes(Exclusion reason) const noexcept {
    return tallies_[static_cast<std::size_t>(reason)].bytes;
  }
  /// One entry for each reason that was met.
  [[nodiscard]] std::vector<StayingTensors> profile() const;

 private:
  struct Tally {
    std::uint64_t tensors = 0;
    std::uint64_t bytes = 0;
  };
  std::array<Tally, exclusion_count + static_cast<std::size_t>(c10::Layout::NumOptions)> tallies_{};
};

}  // namespace sidestream
