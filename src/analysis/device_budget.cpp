#include "analysis/device_budget.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <numeric>

#include "base/mebibytes.h"

namespace sidestream {
namespace {

/// Of the forecast's bytes above the weights: a peak that differs by more is said.
constexpr double kPeakTolerance = 0.03;
/// Of the forecast's seconds. A GPU that does not wait runs at a lower clock, so forecasts are often some percent too low.
constexpr double kTimeTolerance = 0.1;

template <class Number>
Number sum_of(const std::vector<Number>& numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), Number{0});
}

/// In the measured step.
double seconds_of(const MeasuredSequence& sequence) {
  double seconds = sequence.waited;
  for (const LayerPace& pace : sequence.paces) {
    seconds += pace.forward + pace.backward;
  }
  return sequence.passes * seconds;
}

LinkPace at(const LinkPace& link, double part) { return {part * link.to_host, part * link.to_device}; }

double seconds_with(const MeasuredSequence& sequence, const SequencePlan& plan, const LinkPace& link) {
  return sequence.passes *
         pass_seconds(sequence.order, sequence.movable, plan.offloaded, plan.window, sequence.paces, link);
}

/// The part of the link's rate with which the measured plans take the measured time.
double part_of_link(const MeasuredStep& step) {
  constexpr double kLeast = 0.3;
  constexpr double kMost = 1.2;
  constexpr int kHalvings = 30;
  double measured = 0;
  for (const MeasuredSequence& sequence : step.sequences) {
    measured += seconds_of(sequence);
  }
  double low = kLeast;
  double high = kMost;
  for (int i = 0; i < kHalvings; ++i) {
    const double middle = (low + high) / 2;
    double seconds = 0;
    for (const MeasuredSequence& sequence : step.sequences) {
      seconds += seconds_with(sequence, sequence.timed, at(*step.link, middle));
    }
    (seconds > measured ? low : high) = middle;
  }
  return high;
}

}  // namespace

SequencePlan plan_within(const SequenceOrder& order, const std::vector<std::uint64_t>& selected,
                         const std::vector<std::uint64_t>& movable, const CopyWindow& window) {
  SequencePlan plan{window, movable, {}};
  const std::vector<bool> stay = needed_immediately(order, selected, window);
  std::vector<std::uint64_t> bytes = movable;  // those that stay for other reasons are in no copy's way
  for (std::size_t run = 0; run < order.runs(); ++run) {
    if (stay[run]) {
      plan.offloaded[run] = 0;
      bytes[run] = selected[run];
    }
  }
  plan.places = copy_places(order, bytes, plan.offloaded, window);
  return plan;
}

std::vector<std::int64_t> bytes_on_device(const SequenceOrder& order, const std::vector<std::uint64_t>& movable,
                                          const SequencePlan& of) {
  std::vector<std::int64_t> growth(order.size() + 1);
  for (std::size_t run = 0; run < order.runs(); ++run) {
    const auto bytes = static_cast<std::int64_t>(movable[run]);
    growth[order.forward_index(run)] += bytes;
    growth[order.backward_index(run) + 1] -= bytes;
    if (of.offloaded[run] > 0) {
      growth[of.places[run].released_at] -= bytes;
      growth[of.places[run].reload_at] += bytes;
    }
  }
  growth.pop_back();
  std::partial_sum(growth.begin(), growth.end(), growth.begin());
  return growth;
}

SequencePlan MeasuredSequence::plan_with(std::uint64_t lag) const {
  const std::uint64_t largest = selected.empty() ? 0 : *std::max_element(selected.begin(), selected.end());
  return plan_within(order, selected, movable, {std::max(lag, largest), 0});
}

std::vector<std::int64_t> MeasuredSequence::on_device(const SequencePlan& of) const {
  return bytes_on_device(order, movable, of);
}

std::int64_t MeasuredStep::peak() const {
  std::int64_t peak = peak_before;
  for (const MeasuredSegment& segment : segments) {
    peak = std::max({peak, segment.during, segment.after});
  }
  return peak;
}

namespace {

/// By how much more is on the device than with the sequences' plans, by sequence and graph index.
std::vector<std::vector<std::int64_t>> growth_with(const MeasuredStep& step, std::uint64_t lag) {
  std::vector<std::vector<std::int64_t>> growth;
  for (const MeasuredSequence& sequence : step.sequences) {
    growth.push_back(sequence.on_device(sequence.plan_with(lag)));
    const std::vector<std::int64_t> before = sequence.on_device(sequence.plan);
    std::transform(growth.back().begin(), growth.back().end(), before.begin(), growth.back().begin(), std::minus<>());
  }
  return growth;
}

std::int64_t peak_with(const MeasuredStep& step, std::uint64_t lag) {
  const std::vector<std::vector<std::int64_t>> growth = growth_with(step, lag);
  std::int64_t peak = step.peak_before;
  std::vector<std::int64_t> now(step.sequences.size());
  for (const MeasuredSegment& segment : step.segments) {
    now[segment.sequence] = growth[segment.sequence][segment.graph_index];
    peak = std::max(peak, std::max(segment.during, segment.after) + sum_of(now));
  }
  return peak;
}

}  // namespace

StepForecast forecast_step(const MeasuredStep& step, std::uint64_t lag) {
  StepForecast forecast{lag, peak_with(step, lag)};
  const double part = step.seconds > 0 && step.link ? part_of_link(step) : 0;
  double seconds = step.seconds;
  for (const MeasuredSequence& sequence : step.sequences) {
    const SequencePlan plan = sequence.plan_with(lag);
    forecast.moved += std::llround(sequence.passes * static_cast<double>(sum_of(plan.offloaded)));
    if (part > 0) {
      seconds += seconds_with(sequence, plan, at(*step.link, part)) - seconds_of(sequence);
    }
  }
  forecast.seconds = part > 0 ? seconds : 0;
  return forecast;
}

std::int64_t capture_peak(const MeasuredStep& step, std::uint64_t lag) {
  const std::vector<std::vector<std::int64_t>> growth = growth_with(step, lag);
  std::int64_t peak = 0;
  for (const MeasuredSegment& segment : step.captures) {
    peak = std::max(peak, std::max(segment.during, segment.after) + growth[segment.sequence][segment.graph_index]);
  }
  return peak;
}

std::optional<StepForecast> forecast_within(const MeasuredStep& step, std::int64_t budget) {
  const auto fits = [&](std::uint64_t lag) {
    return peak_with(step, lag) <= budget && capture_peak(step, lag) <= budget;
  };
  if (!fits(0)) {
    return std::nullopt;
  }
  std::uint64_t best = 0;
  std::uint64_t above = 0;  // with this lag all stays
  for (const MeasuredSequence& sequence : step.sequences) {
    above = std::max(above, sum_of(sequence.selected));
  }
  if (fits(above)) {
    return forecast_step(step, above);
  }
  while (above - best > 1) {
    const std::uint64_t middle = best + (above - best) / 2;
    (fits(middle) ? best : above) = middle;
  }
  return forecast_step(step, best);
}

std::vector<std::string> differences(const StepForecast& forecast, std::int64_t weights, std::int64_t peak,
                                     double seconds) {
  constexpr double kMilliseconds = 1e3;
  std::vector<std::string> sentences;
  const auto differ = [](double measured, double expected, double allowed) {
    return measured > 0 && std::abs(measured - expected) > allowed;
  };
  const auto of_peak = static_cast<double>(forecast.peak);
  if (differ(static_cast<double>(peak), of_peak, kPeakTolerance * (of_peak - static_cast<double>(weights)))) {
    sentences.push_back("the plan for Options::device_budget expected a peak of " + mebibytes(forecast.peak) +
                        ", and a step took " + mebibytes(peak));
  }
  if (forecast.seconds > 0 && differ(seconds, forecast.seconds, kTimeTolerance * forecast.seconds)) {
    char text[128] = "";
    std::snprintf(text, sizeof text, "a step of %.1f ms, and one took %.1f ms: a difference of more than 10%%",
                  kMilliseconds * forecast.seconds, kMilliseconds * seconds);
    sentences.push_back("the plan for Options::device_budget expected " + std::string(text));
  }
  return sentences;
}

}  // namespace sidestream
