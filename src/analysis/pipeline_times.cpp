#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "sidestream/error.h"
#include "sidestream/pipeline_order.h"

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
  explicit PipelineClock(const std::vector<std::vector<PipelineStep>>& orders)
      : orders_(orders), ranks_(static_cast<std::int64_t>(orders.size())), times_(orders.size()) {
    for (const std::vector<PipelineStep>& order : orders) {
      for (const PipelineStep& step : order) {
        last_stage_ = std::max(last_stage_, step.stage);
        delayed_ = delayed_ || step.kind == Kind::weight_gradients;
      }
    }
  }

  std::vector<std::vector<TimedStep>> run() {
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
      if (const std::size_t at = times_[rank].size(); at < order.size()) {
        const auto [awaited, where] = *awaited_by(order[at], rank);
        throw UsageError("an order of a pipeline waits forever for " + describe(awaited, where) +
                         ", which must run before " + describe(order[at], rank) + "; change the order of the two");
      }
    }
    require_weight_gradients();
    return std::move(times_);
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
    for (std::int64_t rank = 0; rank < ranks_ && delayed_; ++rank) {
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
    std::vector<TimedStep>& times = times_[rank];
    if (times.size() == orders_[rank].size()) {
      return false;
    }
    const PipelineStep& step = orders_[rank][times.size()];
    std::int64_t begin = times.empty() ? 0 : times.back().end;
    if (const std::optional<StepOnRank> awaited = awaited_by(step, rank)) {
      const auto found = ends_.find(key(awaited->first, awaited->second));
      if (found == ends_.end()) {
        return false;
      }
      begin = std::max(begin, found->second);
    }
    const std::int64_t end = begin + (step.kind == Kind::backward && !delayed_ ? 2 : 1);
    if (!ends_.emplace(key(step, rank), end).second) {
      throw UsageError("an order of a pipeline has " + describe(step, rank) + " twice; remove one of them");
    }
    times.push_back({step, begin, end});
    return true;
  }

  const std::vector<std::vector<PipelineStep>>& orders_;
  std::int64_t ranks_;
  std::int64_t last_stage_ = 0;
  bool delayed_ = false;  // some weight gradients are steps of their own
  std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t, Kind>, std::int64_t> ends_;
  std::vector<std::vector<TimedStep>> times_;  // by rank, as far as the steps have run
};

}  // namespace

std::vector<std::vector<TimedStep>> pipeline_times(const std::vector<std::vector<PipelineStep>>& orders) {
  return PipelineClock(orders).run();
}

}  // namespace sidestream
