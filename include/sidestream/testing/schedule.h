#pragma once
#include <cstdint>
#include <string>

#include "sidestream/detail/export.h"

namespace sidestream {

/// An order in which the simulated device may run queued work. Streams and events allow each of them.
///
///     early      everything as soon as it may run, which is the order of issue
///     late       copies last, each just before work that must come after it
///     d2h-early  device-to-host copies at once, host-to-device copies late
///     d2h-late   host-to-device copies at once, device-to-host copies late
///     seed:N     drawn from the seed N: weights for each direction, or priorities for each stream
///     starve:N   stream number N runs only when nothing else may run
///     hold:N     piece of work number N runs as late as possible
///
/// Streams are numbered from 0 in the order of their first use, pieces of work from 0 in the order of issue.
class SIDESTREAM_API Schedule {
 public:
  /// Which of the orders above.
  enum class Kind : std::uint8_t { early, late, d2h_early, d2h_late, seed, starve, hold };

  /// The order of issue.
  Schedule() = default;
  /// `number` is the N of a kind that has one.
  explicit Schedule(Kind kind, std::uint64_t number = 0) noexcept : kind_(kind), number_(number) {}

  /// Reads one of the names above.  Throws: UsageError that lists them, for any other text.
  [[nodiscard]] static Schedule parse(const std::string& text);

  /// Which of the orders it is.
  [[nodiscard]] Kind kind() const noexcept { return kind_; }
  /// The N of a kind that has one.
  [[nodiscard]] std::uint64_t number() const noexcept { return number_; }
  /// The name, which `parse` reads back.
  [[nodiscard]] std::string name() const;

 private:
  Kind kind_ = Kind::early;
  std::uint64_t number_ = 0;
};

}  // namespace sidestream
