#include "graphs/engine/budget_plan.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <numeric>
#include <string>
#include <utility>

#include "base/mebibytes.h"
#include "graphs/calls/engine_sequences.h"
#include "graphs/resources/engine_resources.h"
#include "offload/step_trace.h"
#include "runtime/live_memory.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// How many plans are captured, at most, before the best of them is kept.
constexpr int kCaptures = 3;
/// Steps that are not measured, at most, before another one is.
constexpr std::int64_t kFarthest = 64;
/// Steps that are measured, at most, until each capture that replays has been met.
constexpr int kMeasured = 16;

/// What the captures of `captured` offload, and when.
SequencePlan plan_of(const CapturedSequence& captured) {
  SequencePlan plan;
  plan.window = CopyLimits::smallest(captured.selected);
  for (const CapturedCall& call : captured.calls) {
    plan.offloaded.push_back(call.copies.captured.bytes);
    plan.places.push_back({call.copies.released_at, call.copies.reload_at});
  }
  return plan;
}

MeasuredSequence measured_sequence(const CapturedSequence& captured) {
  MeasuredSequence measured;
  measured.order = captured.order;
  measured.selected = captured.selected;
  measured.paces.resize(captured.calls.size());
  measured.plan = measured.timed = plan_of(captured);
  measured.movable = measured.plan.offloaded;
  return measured;
}

bool has_released_calls(const CapturedSequence& captured) {
  return std::any_of(captured.calls.begin(), captured.calls.end(),
                     [](const CapturedCall& call) { return call.replay.released; });
}

bool moves(const MeasuredSequence& sequence) {
  return std::any_of(sequence.movable.begin(), sequence.movable.end(), [](std::uint64_t bytes) { return bytes > 0; });
}

/// Makes sums over the passes of a step those of one pass. `launched`: how often, by graph index. False if a graph was not whose call has
/// copies.
bool average(MeasuredSequence& sequence, const std::vector<double>& launched) {
  for (std::size_t i = 0; i < launched.size(); ++i) {
    const std::size_t run = sequence.order.run_at(i);
    if (launched[i] == 0 && sequence.movable[run] > 0) {
      return false;
    }
    LayerPace& pace = sequence.paces[run];
    (sequence.order.is_backward(i) ? pace.backward : pace.forward) /= std::max(launched[i], 1.0);
  }
  sequence.passes = *std::max_element(launched.begin(), launched.end());
  sequence.waited /= sequence.passes;
  return true;
}

std::string in_words(const StepForecast& forecast, std::int64_t budget) {
  constexpr double kMilliseconds = 1e3;
  char time[48] = "";
  if (forecast.seconds > 0) {
    std::snprintf(time, sizeof time, " and %.1f ms", kMilliseconds * forecast.seconds);
  }
  return "a step will take " + mebibytes(forecast.peak) + " of device memory (budget: " + mebibytes(budget) + ")" +
         time + ", and its graphed calls will offload " + mebibytes(forecast.moved);
}

/// For a step that is larger than `budget`, and of which nothing can be offloaded.
std::string refusal_of_nothing(const MeasuredStep& step, std::int64_t budget) {
  return "device_budget is " + exact_mebibytes(budget) + ", but a step takes " + exact_mebibytes(step.peak()) +
         ", and nothing that its graphs save can be offloaded; set a budget of at least that, name more in "
         "Options::offload, lower Options::min_bytes, or take a smaller batch";
}

/// Why no plan is within `budget`. `beside`: live bytes beside the graphs that are captured again.
std::string refusal_of(const MeasuredStep& step, std::int64_t beside, std::int64_t budget) {
  const std::int64_t of_step = forecast_step(step, 0).peak;
  const std::int64_t of_captures = capture_peak(step, 0);
  const std::string text =
      of_step >= of_captures
          ? "a step takes " + exact_mebibytes(of_step) +
                " with all offloaded that can be; set a budget of at least that, or take a smaller batch"
          : "to capture the calls again takes " + exact_mebibytes(of_captures) + ", of which " + mebibytes(beside) +
                " are live beside it (gradients, and captures of other shapes); unset gradients before "
                "OffloadEngine::step, take fewer shapes, or set a budget of at least " +
                exact_mebibytes(of_captures);
  return "device_budget is " + exact_mebibytes(budget) + ", but " + text + ". The engine goes on with all offloaded";
}

}  // namespace

BudgetPlan::BudgetPlan(EngineResources& resources, EngineSequences& sequences)
    : resources_(resources), sequences_(sequences) {
  const auto& budget = resources_.options.device_budget();
  if (!budget) {
    return;
  }
  const std::uint64_t weights = resources_.exclusions.registered_bytes();
  const std::int64_t device = resources_.runtime->info().memory_bytes;
  if (*budget <= weights) {
    throw UsageError("device_budget is " + exact_mebibytes(*budget) +
                     ", but the model's weights and buffers alone take " + exact_mebibytes(weights) +
                     "; set a budget that leaves room for gradients and activations");
  }
  if (device > 0 && *budget > static_cast<std::size_t>(device)) {
    throw UsageError("device_budget is " + exact_mebibytes(*budget) + ", but the device has " +
                     exact_mebibytes(device) + "; set a budget of at most that");
  }
  drop();
}

void BudgetPlan::drop() noexcept {
  if (resources_.options.device_budget()) {
    state_ = State::measuring;
    resources_.room_in_budget = 0;
    captures_ = since_ = 0;
    distance_ = 1;
    met_.clear();
    measured_ = 0;
    forecast_.reset();
    peak_ = 0;
    seconds_ = 0;
  }
}

bool BudgetPlan::step_begins(std::int64_t captures) {
  const bool replayed = captures == captures_ && captures > 0;
  captures_ = captures;
  if (!replayed && state_ == State::measuring) {
    met_.clear();
    measured_ = 0;
  }
  wanted_ = (state_ == State::measuring || state_ == State::planned) && replayed && ++since_ >= distance_;
  return wanted_;
}

void BudgetPlan::step_traced() {
  if (!wanted_) {
    return;
  }
  since_ = 0;
  Sequences traced;
  std::optional<MeasuredStep> step = measured(traced);
  const bool is_of_plan = std::is_permutation(traced.begin(), traced.end(), traced_.begin(), traced_.end());
  if (!step || (state_ == State::planned && !is_of_plan)) {  // not all graphs were launched, or others
    distance_ = std::min(2 * distance_, kFarthest);
    return;
  }
  distance_ = 1;
  if (state_ == State::measuring) {
    take(std::move(*step), std::move(traced));
  } else {
    peak_ = step->peak();
    seconds_ = step->seconds;
    state_ = State::settled;
  }
}

void BudgetPlan::take(MeasuredStep step, Sequences traced) {
  captured_ = sequences_.of_calls();
  const auto is_there = [&](const GraphSequence* sequence) {
    return std::find(captured_.begin(), captured_.end(), sequence) != captured_.end();
  };
  if (!std::all_of(met_.begin(), met_.end(), is_there)) {  // some were dropped since
    met_.clear();
    measured_ = 0;
  }
  met_.insert(met_.end(), traced.begin(), traced.end());
  if (measured_++ == 0 || step.peak() > step_.peak()) {
    step_ = std::move(step);
    traced_ = std::move(traced);
  }
  const auto is_met = [&](const GraphSequence* sequence) {
    return sequence->captured().forwards_alone() || !sequence->streams().launched_any() ||
           std::find(met_.begin(), met_.end(), sequence) != met_.end();
  };
  if (measured_ == kMeasured || std::all_of(captured_.begin(), captured_.end(), is_met)) {
    state_ = State::due;
  }
}

std::optional<MeasuredStep> BudgetPlan::measured(Sequences& traced_sequences) const {
  MeasuredStep step;
  std::map<const GraphSequence*, std::size_t> index;
  std::vector<std::vector<double>> launched;  // how often, by sequence and graph index
  StepTrace& trace = resources_.mover->trace();
  const StepTrace::Launches traced = trace.launches();
  const std::vector<const GraphSequence*> calls = sequences_.of_calls();
  for (const StepTrace::Launch& launch : traced.launches) {
    const auto owner = std::find(calls.begin(), calls.end(), launch.owner);
    if (owner == calls.end()) {
      return std::nullopt;
    }
    const GraphSequence* const sequence = *owner;
    const CapturedSequence& captured = sequence->captured();
    const auto [known, is_new] = index.emplace(sequence, step.sequences.size());
    if (is_new && has_released_calls(captured)) {
      return std::nullopt;
    }
    if (is_new) {
      traced_sequences.push_back(sequence);
      step.sequences.push_back(measured_sequence(captured));
      launched.emplace_back(captured.order.size());
    }
    MeasuredSequence& measured = step.sequences[known->second];
    LayerPace& pace = measured.paces[measured.order.run_at(launch.graph_index)];
    (measured.order.is_backward(launch.graph_index) ? pace.backward : pace.forward) += launch.ran;
    measured.waited += launch.waited;
    launched[known->second][launch.graph_index] += 1;
    step.segments.push_back({known->second, launch.graph_index, launch.during, launch.after});
  }
  const bool trains = std::any_of(traced_sequences.begin(), traced_sequences.end(),
                                  [](const GraphSequence* sequence) { return !sequence->captured().forwards_alone(); });
  if (!trains) {
    return std::nullopt;
  }
  for (std::size_t i = 0; i < step.sequences.size(); ++i) {
    if (!average(step.sequences[i], launched[i])) {
      return std::nullopt;
    }
  }
  step.peak_before = traced.peak_before;
  step.seconds = trace.step().seconds;
  step.link = resources_.link();
  return step;
}

void BudgetPlan::make(std::int64_t captures) {
  if (captures != captures_ || captured_ != sequences_.of_calls()) {  // weights were relocated since
    state_ = State::measuring;
    return;
  }
  const auto is_pending = [](const GraphSequence* sequence) { return sequence->pending().any(); };
  if (std::any_of(captured_.begin(), captured_.end(), is_pending)) {  // a backward comes in a later step
    return;
  }
  const auto budget = static_cast<std::int64_t>(*resources_.options.device_budget());
  if (std::none_of(step_.sequences.begin(), step_.sequences.end(), moves)) {
    state_ = State::settled;
    if (step_.peak() > budget && resources_.tree.describe_switches().empty()) {
      throw UsageError(refusal_of_nothing(step_, budget));
    }
    return;
  }
  const auto live = [&] { return LiveMemory::of(resources_.runtime->device()).use(*resources_.runtime).live; };
  const std::int64_t before = live();
  sequences_.reset_calls();
  beside_ = captured_.size() > 1 ? before : live();  // sequences are captured one after the other, beside the others
  count_captures();
  std::optional<StepForecast> next = forecast_within(step_, budget);
  const std::string refusal = next ? "" : refusal_of(step_, beside_, budget);
  try {
    if (!next) {
      recapture(0);
    }
    // A call whose saved tensors stay frees them while its backward runs, so captures take less than was planned, and more may stay. If
    // they take more, for whatever reason, the captures before them were within the budget.
    std::optional<std::uint64_t> within;
    for (int i = 0; i < kCaptures && next && (!forecast_ || next->moved < forecast_->moved); ++i) {
      recapture(std::max<std::uint64_t>(next->lag, 1));
      if (step_.peak() > budget) {
        recapture(within.value_or(0));
        break;
      }
      within = *resources_.room_in_budget;
      forecast_ = next;
      next = forecast_within(step_, budget);
    }
    if (refusal.empty()) {
      forecast_ = forecast_ ? forecast_ : forecast_step(step_, 0);
      forecast_->peak = step_.peak();
    }
    if (const ProgressCallback& progress = resources_.options.progress(); progress && forecast_) {
      const std::string words = in_words(*forecast_, budget);
      progress({ProgressPhase::plan, 0, 1, words, static_cast<std::size_t>(forecast_->peak)});
    }
  } catch (...) {
    sequences_.reset_calls();  // they are captured again before the next step, with all offloaded
    drop();
    throw;
  }
  if (!refusal.empty()) {
    state_ = State::settled;
    throw UsageError(refusal);
  }
  state_ = State::planned;
}

void BudgetPlan::count_captures() {
  step_.captures.clear();
  for (std::size_t i = 0; i < traced_.size(); ++i) {
    const std::vector<PoolUse::GraphUse>& graphs = traced_[i]->captured().pool_use;
    for (std::size_t graph_index = 0; graph_index < graphs.size(); ++graph_index) {
      const PoolUse::GraphUse& use = graphs[graph_index];
      step_.captures.push_back({i, graph_index, beside_ + use.peak, beside_ + use.after});
    }
  }
}

void BudgetPlan::recapture(std::uint64_t room) {
  resources_.room_in_budget = room;
  std::vector<std::size_t> place;  // of each measured sequence among those of the calls
  for (const GraphSequence* const sequence : traced_) {
    place.push_back(std::find(captured_.begin(), captured_.end(), sequence) - captured_.begin());
  }
  std::vector<std::vector<PoolUse::GraphUse>> before;
  for (const std::size_t i : place) {
    before.push_back(captured_[i]->captured().pool_use);
  }
  sequences_.recapture_calls();
  captured_ = sequences_.of_calls();
  for (std::size_t i = 0; i < place.size(); ++i) {
    traced_[i] = captured_[place[i]];
    step_.sequences[i].plan = plan_of(traced_[i]->captured());
  }
  std::vector<std::int64_t> growth(place.size());  // of what each sequence has after its latest graph
  for (MeasuredSegment& segment : step_.segments) {
    const PoolUse::GraphUse& then = before[segment.sequence][segment.graph_index];
    const PoolUse::GraphUse& now = traced_[segment.sequence]->captured().pool_use[segment.graph_index];
    growth[segment.sequence] = 0;
    const std::int64_t others = std::accumulate(growth.begin(), growth.end(), std::int64_t{0});
    growth[segment.sequence] = now.after - then.after;
    segment.during += others + now.peak - then.peak;
    segment.after += others + now.after - then.after;
  }
  count_captures();
}

void BudgetPlan::add_to(Report& report) const {
  if (state_ == State::off) {
    return;
  }
  const auto budget = static_cast<std::int64_t>(*resources_.options.device_budget());
  report.device_budget = budget;
  if (!forecast_) {
    if (report.step_peak_bytes > budget) {
      report.notes.push_back("a step took " + mebibytes(report.step_peak_bytes) +
                             ", more than Options::device_budget (" + mebibytes(budget) + "): " +
                             (state_ == State::settled
                                  ? "no plan meets it, so all is offloaded that can be"
                                  : "there is no plan yet, so all is offloaded that can be. The plan is made when "
                                    "steps that train repeat without new captures"));
    }
    return;
  }
  report.forecast_peak_bytes = forecast_->peak;
  report.forecast_seconds = forecast_->seconds;
  report.forecast_step_peak_bytes = peak_;
  report.forecast_step_seconds = seconds_;
  const auto weights = static_cast<std::int64_t>(resources_.exclusions.registered_bytes());
  if (report.step_peak_bytes > budget) {
    report.notes.push_back(
        "a step took " + mebibytes(report.step_peak_bytes) + ", more than Options::device_budget (" +
        mebibytes(budget) + "); the plan knew a step of " + mebibytes(forecast_->peak) +
        ": other shapes or calls came since, or a replay was verified. OffloadEngine::reset plans anew");
    return;
  }
  for (std::string& difference : differences(*forecast_, weights, peak_, seconds_)) {
    report.notes.push_back(std::move(difference));
  }
}

}  // namespace sidestream
