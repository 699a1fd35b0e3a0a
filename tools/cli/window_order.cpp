#include "tools/cli/window_order.h"

#include <algorithm>
#include <utility>

namespace sidestream::cli {

WindowOrder::WindowOrder(std::size_t bytes, std::size_t window, std::size_t stride, std::uint64_t seed)
    : bytes_(bytes), window_(window), stride_(stride), random_(seed) {
  begin_epoch();
}

std::vector<std::size_t> WindowOrder::next(std::size_t batch) {
  std::vector<std::size_t> offsets;
  offsets.reserve(batch);
  while (offsets.size() < batch) {
    if (position_ == offsets_.size()) {
      begin_epoch();
    }
    offsets.push_back(offsets_[position_++]);
  }
  return offsets;
}

// Own shuffle: std::shuffle and the standard distributions differ between standard libraries, a seed would not reproduce.
void WindowOrder::begin_epoch() {
  const std::size_t slack = std::min(stride_, bytes_ - window_ + 1);
  const std::size_t shift = epoch_ == 0 ? 0 : random_() % slack;
  offsets_.clear();
  for (std::size_t offset = shift; offset + window_ <= bytes_; offset += stride_) {
    offsets_.push_back(offset);
  }
  for (std::size_t i = offsets_.size(); i > 1; --i) {
    std::swap(offsets_[i - 1], offsets_[random_() % i]);
  }
  position_ = 0;
  ++epoch_;
}

}  // namespace sidestream::cli
