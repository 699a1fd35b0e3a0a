#pragma once
#include <ostream>
#include <vector>

#include "unit/graphs/planted_faults.h"

namespace sidestream::testing_model {

/// A rule of the engine's ordering, what takes it out, and a program that needs it.
struct EngineFault {
  const char* place;  ///< the function that holds the rule
  const char* rule;
  const char* program;  ///< in ordered_programs.h
  Fault fault;
  /// Why no order of the recorded steps gives wrong bytes; empty: one does.
  const char* unshown = "";
};

inline void PrintTo(const EngineFault& value, std::ostream* out) { *out << value.place << ": " << value.rule; }

/// Each is found by the journal's check.
[[nodiscard]] const std::vector<EngineFault>& engine_faults();

/// Those of eager groups; part of `engine_faults`.
[[nodiscard]] std::vector<EngineFault> eager_faults();
/// Those of eager groups whose step is one graph; part of `engine_faults`.
[[nodiscard]] std::vector<EngineFault> whole_step_faults();

/// Rules that another one stands in for, always: `unshown` says which. Neither the journal nor an order of the steps can show that
/// they are missing.
[[nodiscard]] const std::vector<EngineFault>& covered_faults();

}  // namespace sidestream::testing_model
