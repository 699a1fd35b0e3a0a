#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "sim/rerun/recording.h"
#include "unit/graphs/ordered_programs.h"

namespace sidestream::testing_model {

/// Two steps of a program on the simulated device, behind those that plan and capture, to be run again in other orders.
class RecordedSteps {
 public:
  /// Runs them. `at_edge` is called before the recorded steps with true, and behind them with false.
  explicit RecordedSteps(
      Program& program, const std::function<void(bool)>& at_edge = [](bool /*begins*/) {});

  /// The first of the named orders and then of `seeds` seeds that gives other gradients than `expected`.
  struct Wrong {
    std::string schedule;  ///< empty: none
    std::size_t bytes = 0;
  };
  [[nodiscard]] Wrong first_wrong(const std::vector<std::byte>& expected, std::uint64_t seeds);

 private:
  std::vector<at::Tensor> results_;
  std::unique_ptr<sim::Recording> recording_;
};

/// The gradients of those steps in plain training.
[[nodiscard]] const std::vector<std::byte>& plain_gradients(const NamedProgram& named, c10::Device device);

}  // namespace sidestream::testing_model
