#include "offload/exclusion_tallies.h"

#include <sstream>
#include <string>

namespace sidestream {
namespace {

std::string reason_name(std::size_t tally) {
  if (tally < exclusion_count) {
    return exclusion_name(static_cast<Exclusion>(tally));
  }
  const auto layout = static_cast<c10::Layout>(tally - exclusion_count);
  std::ostringstream name;
  name << exclusion_name(Exclusion::unsupported);
  if (layout != c10::Layout::Strided) {
    name << " (" << layout << ")";
  }
  return name.str();
}

}  // namespace

void ExclusionTallies::count(Exclusion reason, const at::Tensor& tensor) noexcept {
  if (reason == Exclusion::unsupported) {  // may have no storage
    ++tallies_[exclusion_count + static_cast<std::size_t>(tensor.layout())].tensors;
    return;
  }
  Tally& tally = tallies_[static_cast<std::size_t>(reason)];
  ++tally.tensors;
  tally.bytes += tensor.has_storage() ? tensor.storage().nbytes() : 0;
}

std::vector<StayingTensors> ExclusionTallies::profile() const {
  std::vector<StayingTensors> staying;
  for (std::size_t i = static_cast<std::size_t>(Exclusion::none) + 1; i < tallies_.size(); ++i) {
    if (tallies_[i].tensors > 0) {
      staying.push_back({reason_name(i), tallies_[i].tensors, tallies_[i].bytes});
    }
  }
  return staying;
}

}  // namespace sidestream
