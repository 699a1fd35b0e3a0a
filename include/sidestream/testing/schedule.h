#pragma once
#include <cstdint>
#include <string>

#include "sidestream/detail/export.h"

namespace sidestream {

/// An order in which the sim device may run queued work; every one is legal by streams and events.
///
///   early      everything as soon as it may run (the order of issue)
///   late       copies last, each when something ordered after it runs
///   d2h-early  device-to-host copies at once, host-to-device copies late
///   d2h-late   host-to-device copies at once, device-to-host copies late
///   seed:N     drawn from the seed N: weights per direction, or priorities per stream
///   starve:N   the stream number N, counted from 0 in order of first use, only when nothing else may run
///   hold:N     the piece of work number N, counted from 0 in order of issue, as late as possible
class SIDESTREAM_API Schedule {
 public:
  enum class Kind : std::uint8_t { early, late, d2h_early, d2h_late, seed, starve, hold };

  Schedule() = default;
  explicit Schedule(Kind kind, std::uint64_t number = 0) noexcept : kind_(kind), number_(number) {}

  /// Reads one of the names above. Throws: UsageError that lists them, for any other text.
  [[nodiscard]] static Schedule parse(const std::string& text);

  [[nodiscard]] Kind kind() const noexcept { return kind_; }
  /// The N of those that have one.
  [[nodiscard]] std::uint64_t number() const noexcept { return number_; }
  /// The text that `parse` reads back.
  [[nodiscard]] std::string name() const;

 private:
  Kind kind_ = Kind::early;
  std::uint64_t number_ = 0;
};

}  // namespace sidestream
