#include "sidestream/pipeline_forecast.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <deque>
#include <string>
#include <utility>

#include "analysis/copy_clock.h"
#include "analysis/copy_limits.h"
#include "analysis/device_budget.h"
#include "analysis/pipeline_clock.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

using Kind = PipelineStep::Kind;

constexpr std::int64_t kMostLayers = std::int64_t{1} << 16;
constexpr std::int64_t kMostBytes = std::int64_t{1} << 42;
constexpr double kMostSeconds = 1e6;

std::string number(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%g", value);
  return text.data();
}

void require_seconds(double seconds, const char* what) {
  if (!(seconds >= 0 && seconds <= kMostSeconds)) {
    throw UsageError(std::string(what) + " takes " + number(seconds) + " seconds; it must be 0 to " +
                     number(kMostSeconds));
  }
}

void require_bytes(std::int64_t bytes, const char* what) {
  if (bytes < 0 || bytes > kMostBytes) {
    throw UsageError(std::string(what) + " " + std::to_string(bytes) + " bytes; it must be 0 to " +
                     std::to_string(kMostBytes));
  }
}

void require_rate(double rate, const char* where) {
  if (!(rate >= 1 && std::isfinite(rate))) {
    throw UsageError(std::string("the link carries ") + number(rate) + " bytes a second to the " + where +
                     "; give the rate that ss::measure_link measures, or offload nothing");
  }
}

void require_layers(const PipelineShape& shape, std::int64_t layers) {
  if (layers < 1) {
    throw UsageError("a chunk has " + std::to_string(layers) + " layers; it must have at least 1");
  }
  const std::int64_t chunks = shape.ranks * shape.stages * shape.microbatches;
  if (layers > kMostLayers / chunks) {
    throw UsageError("a forecast of " + std::to_string(chunks) + " chunks with " + std::to_string(layers) +
                     " layers each is too large; at most " + std::to_string(kMostLayers) +
                     " layers of all chunks are possible: use fewer microbatches, or forecast larger layers");
  }
}

/// For a shape whose order is defined.
void require_costs(const PipelineShape& shape, const PipelineCosts& costs) {
  require_layers(shape, costs.layers);
  require_seconds(costs.forward_seconds, "a layer's forward");
  require_seconds(costs.backward_seconds, "a layer's backward");
  require_seconds(costs.weights_seconds, "the computation of a layer's weight gradients");
  require_seconds(costs.send_seconds, "a send");
  if (costs.weights_seconds > costs.backward_seconds) {
    throw UsageError("a layer's weight gradients take " + number(costs.weights_seconds) + " of the " +
                     number(costs.backward_seconds) + " seconds of its backward; they are a part of it");
  }
  require_bytes(costs.saved_bytes, "a layer saves");
  require_bytes(costs.offloadable_bytes, "a layer offloads");
  require_bytes(costs.for_weights_bytes, "a layer keeps for its weight gradients");
  require_bytes(costs.chunk_bytes, "a chunk keeps");
  require_bytes(costs.forward_more_bytes, "a layer's forward takes");
  require_bytes(costs.backward_more_bytes, "a layer's backward takes");
  require_bytes(costs.lag.value_or(0), "the lag is");
  require_bytes(costs.lookahead.value_or(0), "the lookahead is");
  if (costs.offloadable_bytes > costs.saved_bytes) {
    throw UsageError("a layer offloads " + std::to_string(costs.offloadable_bytes) + " bytes, but saves only " +
                     std::to_string(costs.saved_bytes) + "; offload at most what it saves");
  }
  if (costs.offloadable_bytes > 0) {
    require_rate(costs.to_host, "host");
    require_rate(costs.to_device, "device");
  }
}

/// The calls of a rank in its order: each layer of each virtual stage is one, and a chunk runs some of them.
SequenceOrder calls_of(const std::vector<PipelineStep>& order, std::int64_t layers) {
  std::vector<SequenceStep> steps;
  for (const PipelineStep& step : order) {
    for (std::int64_t i = 0; i < layers; ++i) {
      const std::int64_t layer = step.kind == Kind::forward ? i : layers - 1 - i;
      steps.push_back({static_cast<std::size_t>(step.stage * layers + layer), static_cast<std::size_t>(step.microbatch),
                       static_cast<Direction>(step.kind)});
    }
  }
  return SequenceOrder(std::move(steps));
}

/// What the engine plans with these costs.
SequencePlan plan_of(const SequenceOrder& order, const PipelineCosts& costs, const LayerPace& pace) {
  const std::vector<std::uint64_t> offloadable(order.runs(), static_cast<std::uint64_t>(costs.offloadable_bytes));
  CopyLimits limits;
  limits.lag = costs.lag;
  limits.lookahead = costs.lookahead;
  const CopyLimits::Calls calls{
      {}, std::vector<LayerPace>(order.runs(), pace), LinkPace{costs.to_host, costs.to_device}};
  return plan_within(order, offloadable, offloadable, limits.for_calls(order, offloadable, calls));
}

/// Runs the steps of one rank.
class RankClock {
 public:
  RankClock(const std::vector<PipelineStep>& order, const PipelineCosts& costs)
      : costs_(costs),
        delayed_(delays_weight_gradients({order})),
        pace_{costs.forward_seconds, costs.backward_seconds - (delayed_ ? costs.weights_seconds : 0)},
        order_(calls_of(order, costs.layers)),
        plan_(plan_of(order_, costs, pace_)),
        clock_(order_, plan_.offloaded, plan_.places, {costs.to_host, costs.to_device}) {
    const auto on_device = [&](std::int64_t bytes, const SequencePlan& plan) {
      return bytes_on_device(order_, std::vector<std::uint64_t>(order_.runs(), static_cast<std::uint64_t>(bytes)),
                             plan);
    };
    const SequencePlan nothing{{}, std::vector<std::uint64_t>(order_.runs()), {}};
    saved_without_ = on_device(costs.saved_bytes, nothing);
    saved_ = on_device(costs.saved_bytes - costs.offloadable_bytes, nothing);
    const std::vector<std::int64_t> offloadable = on_device(costs.offloadable_bytes, plan_);
    std::transform(saved_.begin(), saved_.end(), offloadable.begin(), saved_.begin(), std::plus<>());
  }
  RankClock(const RankClock&) = delete;
  RankClock& operator=(const RankClock&) = delete;

  /// See RunStep.
  double run(const PipelineStep& step, double arrived) {
    const double free = clock_.now();
    clock_.wait_until(arrived);
    forecast_.idle_seconds += clock_.now() - free;
    ForecastStep& timed = forecast_.steps.emplace_back(ForecastStep{step, clock_.now(), 0, 0});
    other_ += step.kind == Kind::forward ? costs_.chunk_bytes : 0;
    for (std::int64_t i = 0; i < costs_.layers; ++i) {
      if (step.kind == Kind::weight_gradients) {
        clock_.work(costs_.weights_seconds);
        other_ -= costs_.for_weights_bytes;
        note_memory(clock_.now(), now_saved_, now_saved_without_);
      } else {
        run_graph(step.kind, timed);
      }
    }
    if (step.kind == Kind::backward) {
      other_ -= costs_.chunk_bytes;
      note_memory(clock_.now(), now_saved_, now_saved_without_);
    }
    timed.end = clock_.now();
    forecast_.waited_seconds += timed.waited;
    forecast_.busy_seconds += timed.end - timed.begin - timed.waited;
    return timed.end;
  }

  /// After all steps, in a pipeline's step that takes `seconds`.
  RankForecast finish(double seconds) {
    forecast_.seconds = seconds;
    forecast_.idle_seconds += seconds - clock_.now();
    for (std::size_t run = 0; run < order_.runs(); ++run) {
      add_copy(run, clock_.offloads()[run], forecast_.to_host);
      add_copy(order_.by_backward()[run], clock_.reloads()[order_.by_backward()[run]], forecast_.to_device);
      forecast_.offloaded_bytes += static_cast<std::int64_t>(plan_.offloaded[run]);
    }
    return std::move(forecast_);
  }

 private:
  void run_graph(Kind kind, ForecastStep& timed) {
    const bool backward = kind == Kind::backward;
    const double before = clock_.now();
    const TimeSpan graph = clock_.run_graph(backward ? pace_.backward : pace_.forward);
    timed.waited += graph.begin - before;
    const std::int64_t more = backward ? costs_.backward_more_bytes : costs_.forward_more_bytes;
    note_memory(graph.begin, saved_[graph_index_] + more, saved_without_[graph_index_] + more);
    now_saved_ = saved_[graph_index_] - (backward ? costs_.saved_bytes : 0);
    now_saved_without_ = saved_without_[graph_index_] - (backward ? costs_.saved_bytes : 0);
    other_ += backward && delayed_ ? costs_.for_weights_bytes : 0;
    note_memory(graph.end, now_saved_, now_saved_without_);
    ++graph_index_;
  }

  void note_memory(double time, std::int64_t bytes, std::int64_t without) {
    forecast_.live.push_back({time, bytes + other_});
    forecast_.peak_bytes = std::max(forecast_.peak_bytes, bytes + other_);
    forecast_.peak_bytes_without_offload = std::max(forecast_.peak_bytes_without_offload, without + other_);
  }

  void add_copy(std::size_t run, const TimeSpan& span, std::vector<ForecastCopy>& copies) const {
    if (plan_.offloaded[run] > 0) {
      const SequenceStep& forward = order_.steps()[order_.forward_index(run)];
      const auto call = static_cast<std::int64_t>(forward.call);
      copies.push_back({call / costs_.layers, static_cast<std::int64_t>(forward.microbatch), call % costs_.layers,
                        span.begin, span.end});
    }
  }

  const PipelineCosts& costs_;
  bool delayed_;
  LayerPace pace_;
  SequenceOrder order_;
  SequencePlan plan_;
  CopyClock clock_;
  std::vector<std::int64_t> saved_;          // by graph index: saved bytes on the device while it runs
  std::vector<std::int64_t> saved_without_;  // the same if nothing is offloaded
  std::int64_t now_saved_ = 0;
  std::int64_t now_saved_without_ = 0;
  std::int64_t other_ = 0;  // bytes of chunks, and kept for weight gradients
  std::size_t graph_index_ = 0;
  RankForecast forecast_;
};

}  // namespace

std::vector<RankForecast> forecast_pipeline(const PipelineShape& shape, const PipelineCosts& costs) {
  std::vector<std::vector<PipelineStep>> orders{pipeline_order(shape, 0)};
  require_costs(shape, costs);
  std::deque<RankClock> clocks;
  clocks.emplace_back(orders.front(), costs);
  for (std::int64_t rank = 1; rank < shape.ranks; ++rank) {
    clocks.emplace_back(orders.emplace_back(pipeline_order(shape, rank)), costs);
  }
  double seconds = 0;
  run_pipeline(orders, costs.send_seconds, [&](std::int64_t rank, const PipelineStep& step, double arrived) {
    const double end = clocks[static_cast<std::size_t>(rank)].run(step, arrived);
    seconds = std::max(seconds, end);
    return end;
  });
  std::vector<RankForecast> forecasts;
  for (RankClock& clock : clocks) {
    forecasts.push_back(clock.finish(seconds));
  }
  return forecasts;
}

RankForecast forecast_rank(const PipelineShape& shape, const PipelineCosts& costs, std::int64_t rank) {
  const std::vector<PipelineStep> order = pipeline_order(shape, rank);
  require_costs(shape, costs);
  RankClock clock(order, costs);
  double seconds = 0;
  for (const PipelineStep& step : order) {
    seconds = clock.run(step, 0);
  }
  return clock.finish(seconds);
}

}  // namespace sidestream
