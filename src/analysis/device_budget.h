#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "analysis/copy_pace.h"
#include "analysis/copy_places.h"
#include "analysis/sequence_order.h"

namespace sidestream {

/// What is offloaded and reloaded of a sequence, and when.
struct SequencePlan {
  CopyWindow window;
  std::vector<std::uint64_t> offloaded;  ///< bytes, by run
  std::vector<CopyPlaces> places;        ///< by run
};

/// The plan of a sequence with the window `window`, for runs that save `selected` bytes, of which `movable` can be offloaded. A run that
/// is needed immediately is not offloaded. Pure.
[[nodiscard]] SequencePlan plan_within(const SequenceOrder& order, const std::vector<std::uint64_t>& selected,
                                       const std::vector<std::uint64_t>& movable, const CopyWindow& window);

/// By graph index: of the `movable` bytes, those which are on the device while that graph runs, with the plan `of`. Pure.
[[nodiscard]] std::vector<std::int64_t> bytes_on_device(const SequenceOrder& order,
                                                        const std::vector<std::uint64_t>& movable,
                                                        const SequencePlan& of);

/// A sequence whose runs were all offloaded as far as they can be, while a step was measured.
struct MeasuredSequence {
  SequenceOrder order;
  std::vector<std::uint64_t> selected;  ///< by run: bytes that the options name
  std::vector<std::uint64_t> movable;   ///< by run: those of them that can be offloaded
  SequencePlan plan;                    ///< with which the segments of a step are as they are
  SequencePlan timed;                   ///< of the step that was measured
  std::vector<LayerPace> paces;         ///< by run, of one pass; zeros without a clock
  double waited = 0;                    ///< seconds that graphs waited for copies, in one pass
  double passes = 1;                    ///< in the step

  /// The plan with which `lag` is the most that saved tensors take on the device, if no run needs more. What fits is not offloaded.
  [[nodiscard]] SequencePlan plan_with(std::uint64_t lag) const;
  /// By graph index: of the movable bytes, those which are on the device while that graph runs, with the plan `of`.
  [[nodiscard]] std::vector<std::int64_t> on_device(const SequencePlan& of) const;
};

/// From the launch of a graph to the next launch of any graph. Peaks of live device bytes.
struct MeasuredSegment {
  std::size_t sequence = 0;
  std::size_t graph_index = 0;
  std::int64_t during = 0;  ///< while the graph runs
  std::int64_t after = 0;   ///< and from then on
};

/// A step that was measured.
struct MeasuredStep {
  std::vector<MeasuredSequence> sequences;
  std::vector<MeasuredSegment> segments;
  std::vector<MeasuredSegment> captures;  ///< not of the step: while the sequences are captured again, as `plan` says
  std::int64_t peak_before = 0;           ///< of live device bytes, before the first graph
  double seconds = 0;                     ///< 0 if there was no clock
  std::optional<LinkPace> link;           ///< if it is known

  [[nodiscard]] std::int64_t peak() const;
};

/// What a step will take with a certain lag.
struct StepForecast {
  std::uint64_t lag = 0;   ///< of each sequence, as CopyWindow::lag
  std::int64_t peak = 0;   ///< of live device bytes
  double seconds = 0;      ///< 0 if it is not known
  std::int64_t moved = 0;  ///< bytes offloaded
};

/// The same step, with `lag` for each sequence.
///
/// Memory: what each segment had on the device beside the saved tensors stays; these are where the plan puts them.
/// Time: what is no graph takes as long as measured, and graphs as copy_pace says. The link's rate is the one with which copy_pace gives
/// the measured waits, since copies reach less than the whole rate beside compute. Pure.
[[nodiscard]] StepForecast forecast_step(const MeasuredStep& step, std::uint64_t lag);

/// The peak of live device bytes while the sequences are captured again with `lag`; 0 if `captures` is empty. Pure.
[[nodiscard]] std::int64_t capture_peak(const MeasuredStep& step, std::uint64_t lag);

/// The largest lag, and so the fewest offloaded bytes and the fewest waits, with which neither a step nor the captures have a higher peak
/// than `budget`. Not set if there is none. Pure.
[[nodiscard]] std::optional<StepForecast> forecast_within(const MeasuredStep& step, std::int64_t budget);

/// One sentence if the measured peak differs from `forecast` by more than a tolerance, and one if the measured time does.
/// `weights`: bytes of the peak that no plan changes. `peak`, `seconds`: measured; 0 if they were not. Pure.
[[nodiscard]] std::vector<std::string> differences(const StepForecast& forecast, std::int64_t weights,
                                                   std::int64_t peak, double seconds);

}  // namespace sidestream
