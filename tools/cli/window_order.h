#pragma once
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace sidestream::cli {

/// The order in which a run reads its text: every window of an epoch once, shuffled, then the next epoch with the window
/// borders shifted. Equal seeds give equal orders on every machine.
class WindowOrder {
 public:
  /// Windows of `window` bytes that start `stride` bytes apart in a text of `bytes` bytes. `window <= bytes`, `stride > 0`.
  WindowOrder(std::size_t bytes, std::size_t window, std::size_t stride, std::uint64_t seed);

  /// The offsets of the next `batch` windows.
  [[nodiscard]] std::vector<std::size_t> next(std::size_t batch);
  /// Epochs begun so far.
  [[nodiscard]] std::size_t epoch() const noexcept { return epoch_; }

 private:
  void begin_epoch();

  std::size_t bytes_;
  std::size_t window_;
  std::size_t stride_;
  std::mt19937_64 random_;
  std::vector<std::size_t> offsets_;
  std::size_t position_ = 0;
  std::size_t epoch_ = 0;
};

}  // namespace sidestream::cli
