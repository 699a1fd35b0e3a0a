#pragma once
#include <optional>
#include <string>
#include <vector>

#include "sidestream/detail/module_forward.h"

namespace sidestream {

/// The numbers among the options of LibTorch's own modules that a forward reads and that schedules change: dropout rates,
/// momenta, bounds. Valid while the module lives.
/// Threads: one at a time. Comparing allocates nothing.
class ModuleOptions {
 public:
  /// As they are now; none for a class that is not known.
  explicit ModuleOptions(const torch::nn::Module& module);

  [[nodiscard]] bool same() const noexcept;
  [[nodiscard]] bool empty() const noexcept { return numbers_.empty() && optional_numbers_.empty(); }
  /// "p is 0.5, was 0.1"; empty if all are the same. Allocates.
  [[nodiscard]] std::string difference() const;

 private:
  friend class OptionReader;
  struct Number {
    const char* name;
    const double* at;
    double was;
  };
  struct OptionalNumber {
    const char* name;
    const std::optional<double>* at;
    std::optional<double> was;
  };
  std::vector<Number> numbers_;
  std::vector<OptionalNumber> optional_numbers_;
};

}  // namespace sidestream
