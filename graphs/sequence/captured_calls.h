#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "graphs/sequence/captured_call.h"

namespace sidestream {

/// The calls of a sequence, in the order of their captures. Counts how often one is looked at, so that a test can tell a step whose work
/// is linear in them from one that looks at all of them in each replay.
/// Threads: as a vector; the count is right where one thread looks at a time.
class CapturedCalls {
 public:
  CapturedCalls() = default;
  CapturedCalls(const CapturedCalls&) = delete;
  CapturedCalls& operator=(const CapturedCalls&) = delete;
  ~CapturedCalls() = default;

  [[nodiscard]] CapturedCall& operator[](std::size_t index) {
    count(1);
    return all_[index];
  }
  [[nodiscard]] const CapturedCall& operator[](std::size_t index) const {
    count(1);
    return all_[index];
  }
  /// For who looks at all of them: so many are counted.
  [[nodiscard]] auto begin() {
    count(all_.size());
    return all_.begin();
  }
  [[nodiscard]] auto begin() const {
    count(all_.size());
    return all_.begin();
  }
  [[nodiscard]] auto end() { return all_.end(); }
  [[nodiscard]] auto end() const { return all_.end(); }
  [[nodiscard]] const CapturedCall& front() const { return (*this)[0]; }
  [[nodiscard]] std::size_t size() const noexcept { return all_.size(); }
  void resize(std::size_t size) { all_.resize(size); }

  [[nodiscard]] std::uint64_t looks() const noexcept { return looks_.load(std::memory_order_relaxed); }

 private:
  void count(std::size_t looks) const noexcept {  // a store is enough: no replay pays for a locked addition
    looks_.store(looks_.load(std::memory_order_relaxed) + looks, std::memory_order_relaxed);
  }

  std::vector<CapturedCall> all_;
  mutable std::atomic<std::uint64_t> looks_{0};
};

}  // namespace sidestream
