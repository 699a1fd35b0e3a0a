#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "analysis/pipeline_clock.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

using Kind = PipelineStep::Kind;

std::string describe(const PipelineStep& step, std::int64_t rank) {
  const char* work = step.kind == Kind::forward    ? "forward"
                     : step.kind == Kind::backward ? "backward"
                                                   : "weight gradients";
  return std::string("the ") + work + " of microbatch " + std::to_string(step.microbatch) + " in virtual stage " +
         std::to_string(step.stage) + " of rank " + std::to_string(rank);
}

/// Runs the steps of all ranks, each as early as it can.
class PipelineClock {
 public:
  PipelineClock(const std::vector<std::vector<PipelineStep>>& orders, double send_seconds, const RunStep& run)
      : orders_(orders),
        run_(run),
        send_seconds_(send_seconds),
        ranks_(static_cast<std::int64_t>(orders.size())),
        done_(orders.size()) {
    for (const std::vector<PipelineStep>& order : orders) {
      for (const PipelineStep& step : order) {
        last_stage_ = std::max(last_stage_, step.stage);
      }
    }
  }

  void run() {
    for (bool ran = true; ran;) {
      ran = false;
      for (std::int64_t rank = 0; rank < ranks_; ++rank) {
        while (run_next(rank)) {
          ran = true;
        }
      }
    }
    for (std::int64_t rank = 0; rank < ranks_; ++rank) {
      const std::vector<PipelineStep>& order = orders_[rank];
      if (const std::size_t at = done_[rank]; at < order.size()) {
        const auto [awaited, where] = *awaited_by(order[at], rank);
        throw UsageError("an order of a pipeline waits forever for " + describe(awaited, where) +
                         ", which must run before " + describe(order[at], rank) + "; change the order of the two");
      }
    }
    if (delays_weight_gradients(orders_)) {
      require_weight_gradients();
    }
  }

 private:
  using StepOnRank = std::pair<PipelineStep, std::int64_t>;

  static std::tuple<std::int64_t, std::int64_t, std::int64_t, Kind> key(const PipelineStep& step, std::int64_t rank) {
    return {rank, step.stage, step.microbatch, step.kind};
  }

  /// What must end before `step` begins; not set for the first virtual stage's forward.
  [[nodiscard]] std::optional<StepOnRank> awaited_by(const PipelineStep& step, std::int64_t rank) const {
    PipelineStep awaited = step;
    switch (step.kind) {
      case Kind::forward:
        awaited.stage -= rank == 0 ? 1 : 0;
        return awaited.stage < 0 ? std::nullopt : std::optional(StepOnRank(awaited, rank == 0 ? ranks_ - 1 : rank - 1));
      case Kind::backward:
        if (step.stage == last_stage_ && rank == ranks_ - 1) {
          awaited.kind = Kind::forward;
          return StepOnRank(awaited, rank);
        }
        awaited.stage += rank == ranks_ - 1 ? 1 : 0;
        return StepOnRank(awaited, rank == ranks_ - 1 ? 0 : rank + 1);
      case Kind::weight_gradients:
        awaited.kind = Kind::backward;
        return StepOnRank(awaited, rank);
    }
    return std::nullopt;
  }

  /// If some weight gradients are steps of their own, each backward's are: no backward computes them itself.
  void require_weight_gradients() const {
    for (std::int64_t rank = 0; rank < ranks_; ++rank) {
      for (PipelineStep step : orders_[rank]) {
        if (step.kind == Kind::backward) {
          step.kind = Kind::weight_gradients;
          if (ends_.count(key(step, rank)) == 0) {
            throw UsageError("an order of a pipeline never computes " + describe(step, rank) +
                             ", but delays others; add them as a step after their backward");
          }
        }
      }
    }
  }

  /// Runs the next step of `rank`. False if there is none, or if it waits for a step that has not run.
  bool run_next(std::int64_t rank) {
    if (done_[rank] == orders_[rank].size()) {
      return false;
    }
    const PipelineStep& step = orders_[rank][done_[rank]];
    double arrived = 0;
    if (const std::optional<StepOnRank> awaited = awaited_by(step, rank)) {
      const auto found = ends_.find(key(awaited->first, awaited->second));
      if (found == ends_.end()) {
        return false;
      }
      const bool is_sent = awaited->first.kind == step.kind;  // else the two belong to one chunk
      arrived = found->second + (is_sent ? send_seconds_ : 0);
    }
    if (ends_.count(key(step, rank)) > 0) {
      throw UsageError("an order of a pipeline has " + describe(step, rank) + " twice; remove one of them");
    }
    ends_[key(step, rank)] = run_(rank, step, arrived);
    ++done_[rank];
    return true;
  }

  const std::vector<std::vector<PipelineStep>>& orders_;
  const RunStep& run_;
  double send_seconds_;
  std::int64_t ranks_;
  std::int64_t last_stage_ = 0;
  std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t, Kind>, double> ends_;
  std::vector<std::size_t> done_;  // by rank: steps that have run
};

}  // namespace

bool delays_weight_gradients(const std::vector<std::vector<PipelineStep>>& orders) {
  const auto has_weights = [](const std::vector<PipelineStep>& order) {
    return std::any_of(order.begin(), order.end(),
                       [](const PipelineStep& step) { return step.kind == Kind::weight_gradients; });
  };
  return std::any_of(orders.begin(), orders.end(), has_weights);
}

void run_pipeline(const std::vector<std::vector<PipelineStep>>& orders, double send_seconds, const RunStep& run) {
  PipelineClock(orders, send_seconds, run).run();
}

std::vector<std::vector<TimedStep>> pipeline_times(const std::vector<std::vector<PipelineStep>>& orders) {
  const bool delayed = delays_weight_gradients(orders);
  std::vector<std::vector<TimedStep>> times(orders.size());
  run_pipeline(orders, 0, [&](std::int64_t rank, const PipelineStep& step, double arrived) {
    const std::int64_t free = times[rank].empty() ? 0 : times[rank].back().end;
    const std::int64_t begin = std::max(free, static_cast<std::int64_t>(arrived));
    times[rank].push_back({step, begin, begin + (step.kind == Kind::backward && !delayed ? 2 : 1)});
    return static_cast<double>(times[rank].back().end);
  });
  return times;
}

}  // namespace sidestream
