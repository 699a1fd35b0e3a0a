#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "tools/cli/training_result.h"
#include "tools/cli/training_run.h"

namespace sidestream::cli {

/// Steps of one run with their times and the device's memory peaks: of the first steps, then of the rest.
class Measurement {
 public:
  /// How many come before the rest: sizing, capture, and the first replay. With a budget also a step that is measured for its plan, and
  /// the same once more.
  [[nodiscard]] static std::int64_t first_steps(const TrainingOptions& options) {
    return options.device_budget_mib ? 6 : 3;
  }

  Measurement(const TrainingOptions& options, c10::Device device, std::string name);

  /// One step of `run`; `with_gradients` as TrainingRun::step takes it.
  void step(TrainingRun& run, double& loss, const std::function<void()>& with_gradients = {});
  [[nodiscard]] ModeResult finish(const TrainingRun& run);

 private:
  c10::Device device_;
  ModeResult result_;
  std::int64_t first_steps_;
  std::int64_t steps_ = 0;
  std::vector<double> seconds_;
};

}  // namespace sidestream::cli
