#pragma once
#include <atomic>
#include <cstddef>

namespace sidestream {

/// How many bytes the arenas that share it may pin together.  Threads: any.
class HostBudget {
 public:
  explicit HostBudget(std::size_t cap) noexcept : cap_(cap) {}

  [[nodiscard]] std::size_t cap() const noexcept { return cap_; }
  [[nodiscard]] std::size_t room() const noexcept { return cap_ - taken_.load(); }
  /// False if so many are not left; nothing is taken then.
  [[nodiscard]] bool take(std::size_t bytes) noexcept {
    std::size_t taken = taken_.load();
    while (bytes <= cap_ - taken) {
      if (taken_.compare_exchange_weak(taken, taken + bytes)) {
        return true;
      }
    }
    return false;
  }
  void give_back(std::size_t bytes) noexcept { taken_ -= bytes; }

 private:
  const std::size_t cap_;
  std::atomic<std::size_t> taken_{0};
};

}  // namespace sidestream
