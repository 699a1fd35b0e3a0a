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
  static constexpr std::int64_t kFirstSteps = 3;  ///< sizing, capture, and the first replay

  Measurement(c10::Device device, std::string name);

  /// One step of `run`; `with_gradients` as TrainingRun::step takes it.
  void step(TrainingRun& run, double& loss, const std::function<void()>& with_gradients = {});
  [[nodiscard]] ModeResult finish(const TrainingRun& run);

 private:
  c10::Device device_;
  ModeResult result_;
  std::int64_t steps_ = 0;
  std::vector<double> seconds_;
};

}  // namespace sidestream::cli
