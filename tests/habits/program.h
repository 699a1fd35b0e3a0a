#pragma once
#include <cstdint>
#include <iosfwd>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>

#include <c10/core/Device.h>

#include "habits/action.h"
#include "habits/statistics.h"
#include "habits/step_plan.h"
#include "habits/trainer.h"
#include "warnings.h"

namespace sidestream::habits {

/// A program gave something else than plain training, without a typed error.
class Difference : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// One program: a trainer with an engine and its plain twin, action by action.
class Program {
 public:
  /// Writes each action to `log` before it runs.
  Program(const Setup& setup, c10::Device device, std::ostream& log, Statistics& statistics);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  /// Throws: Difference.
  void perform(const Action& action);

 private:
  struct Outcome {
    enum class Kind : std::uint8_t { done, left, refused, error };
    Kind kind = Kind::done;
    std::string message;
  };
  template <class Run>
  Outcome attempt(Trainer& side, const Run& run);

  /// What `action` is made of: changes, and steps between them.
  void step(const Action& action, StepPlan plan);
  void change(const Action& action);
  void settle(const Action& action, const Outcome& mine, const Outcome& plain);
  void compare(const Action& action) const;
  void count(const Action& action);

  c10::Device device_;
  std::ostream& log_;
  Statistics& statistics_;
  std::optional<Trainer> mine_, plain_;
  std::set<Kind> earlier_;
  std::optional<testing_model::ExpectedWarnings>
      bound_warnings_;  ///< of a form whose calls meet their bound of captures
  std::int64_t data_ = 0;
  std::int64_t changes_ = 0;
};

}  // namespace sidestream::habits
