#pragma once
#include <cstdint>
#include <memory>
#include <optional>

#include "observe/checked_runtime.h"
#include "observe/operator_observer.h"
#include "sidestream/journal.h"

namespace sidestream {

/// Writes an engine's first steps into a journal and checks them (Options::check_steps). Threads: the step's.
class StepCheck {
 public:
  /// `steps`: how many; 0 checks none, and `runtime` is left as it is.
  StepCheck(std::shared_ptr<Runtime> runtime, std::int64_t steps);

  /// The runtime for the engine: the given one, wrapped if steps are checked.
  [[nodiscard]] const std::shared_ptr<Runtime>& runtime() const noexcept { return runtime_; }
  /// Null if nothing is checked.
  [[nodiscard]] const std::shared_ptr<CheckedRuntime>& checked() const noexcept { return checked_; }
  [[nodiscard]] Journal journal() const { return checked_ != nullptr ? checked_->journal() : Journal(); }

  /// Of the step that follows `steps_done` whole ones.
  void begin_step(std::int64_t steps_done);
  /// In a checked step: operators of the calling thread go into the journal while `guard` lives, and into that of another
  /// engine's step around this one as well. Other engines' captures do not: the journal knows nothing of their streams.
  void journal_step(std::optional<OperatorObserverGuard>& guard, std::int64_t steps_done) const;
  /// The same for operators of a capture, in a step or between two.
  void journal_capture(std::optional<OperatorObserverGuard>& guard, std::int64_t steps_done) const;

 private:
  [[nodiscard]] bool journals(std::int64_t steps_done) const noexcept {
    return checked_ != nullptr && steps_done < steps_;
  }
  [[nodiscard]] OperatorObserverGuard::Observe observer() const;

  std::int64_t steps_;
  std::shared_ptr<CheckedRuntime> checked_;
  std::shared_ptr<Runtime> runtime_;
};

}  // namespace sidestream
