#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "analysis/device_budget.h"
#include "sidestream/report.h"

namespace sidestream {

class EngineSequences;
class GraphSequence;
struct EngineResources;

/// What Options::device_budget does in one engine. The first captures offload all that they can. The second step that replays them is
/// measured. If other captures replay in other steps (of other shapes), these are measured too, up to a number of steps, and the one with
/// the highest peak counts. Before the next step the largest lag that stays within the budget is planned, and the calls are captured again
/// with it. A step of these captures is measured too, and compared with the forecast. Does nothing if the option is not set.
/// Threads: the step's.
class BudgetPlan {
 public:
  /// Both must outlive this object. Throws: UsageError for a budget below the model's weights, or above the device's memory.
  BudgetPlan(EngineResources& resources, EngineSequences& sequences);
  BudgetPlan(const BudgetPlan&) = delete;
  BudgetPlan& operator=(const BudgetPlan&) = delete;
  ~BudgetPlan() = default;

  /// True if the calls are to be captured again, by `make`.
  [[nodiscard]] bool due() const noexcept { return state_ == State::due; }
  /// Plans, and captures again. If a backward is pending, it stays due. `captures`: how many graphs have been captured so far.
  /// Throws: UsageError if no plan is within the budget, or not while it is captured; all stays offloaded then. Errors of the captures.
  void make(std::int64_t captures);
  /// A planned step begins; `captures`: how many graphs have been captured so far. True if the step is to be traced.
  [[nodiscard]] bool step_begins(std::int64_t captures);
  /// It has ended, and was traced.
  void step_traced();
  /// The captures are dropped: all begins anew.
  void drop() noexcept;
  void add_to(Report& report) const;

 private:
  enum class State : std::uint8_t {
    off,
    measuring,  ///< of captures that offload all they can
    due,
    planned,  ///< to be compared with the forecast
    settled,
  };

  using Sequences = std::vector<const GraphSequence*>;

  /// Of the step that was traced; not set if it left graphs out. `traced`: becomes the step's sequences.
  [[nodiscard]] std::optional<MeasuredStep> measured(Sequences& traced) const;
  /// `step` has run with all offloaded, in `traced`.
  void take(MeasuredStep step, Sequences traced);
  /// Puts into `step_` what is on the device while the calls are captured again.
  void count_captures();
  /// Captures the calls with this room for what stays, 0 for none, and puts into `step_` what the new captures take.
  void recapture(std::uint64_t room);

  EngineResources& resources_;
  EngineSequences& sequences_;
  State state_ = State::off;
  std::int64_t captures_ = 0;  ///< when the latest step began
  bool wanted_ = false;        ///< the trace of the latest step
  std::int64_t since_ = 0;     ///< steps since one was measured
  std::int64_t distance_ = 1;  ///< from one that is measured to the next
  MeasuredStep step_;          ///< of those that were measured, the one with the highest peak
  Sequences captured_;         ///< all of the calls, when the step was measured
  Sequences traced_;           ///< those of `step_`
  Sequences met_;              ///< those of all steps that were measured
  int measured_ = 0;           ///< steps that were measured before the plan
  std::int64_t beside_ = 0;    ///< live bytes beside the graphs that are captured again
  std::optional<StepForecast> forecast_;
  std::int64_t peak_ = 0;  ///< measured under the plan
  double seconds_ = 0;     ///< likewise
};

}  // namespace sidestream
