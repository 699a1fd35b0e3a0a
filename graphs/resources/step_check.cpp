#include "graphs/resources/step_check.h"

#include <torch/csrc/autograd/function.h>

#include "offload/saved_tensor_recorder.h"
#include "runtime/capture_turn.h"

namespace sidestream {

StepCheck::StepCheck(std::shared_ptr<Runtime> runtime, std::int64_t steps)
    : steps_(steps),
      checked_(steps > 0 ? std::make_shared<CheckedRuntime>(runtime) : nullptr),
      runtime_(checked_ != nullptr ? checked_ : std::move(runtime)) {}

void StepCheck::begin_step(std::int64_t steps_done) {
  if (checked_ == nullptr) {
    return;
  }
  if (steps_done < steps_) {
    checked_->begin_step(static_cast<std::uint64_t>(steps_done + 1));
  } else {
    checked_->stop();
  }
}

OperatorObserverGuard::Observe StepCheck::observer() const {
  return [checked = checked_](const OperatorAccess& access) {
    if (const auto node = torch::autograd::get_current_node(); node != nullptr) {
      checked->observe(access, "backward", node->name());
    } else if (const SavedTensorRecorder* recorder = current_recorder(); recorder != nullptr && recorder->depth() > 1) {
      checked->observe(access, "forward", recorder->scope().name);
    } else {
      checked->observe(access);
    }
  };
}

void StepCheck::journal_step(std::optional<OperatorObserverGuard>& guard, std::int64_t steps_done) const {
  if (!journals(steps_done)) {
    return;
  }
  // A capture that is observed here is another engine's: this engine's own capture has a guard of its own inside.
  const auto outside_of_captures = [observe = observer(), device = runtime_->device()](const OperatorAccess& access) {
    if (!CaptureTurn::mine(device)) {
      observe(access);
    }
  };
  guard.emplace(outside_of_captures, OperatorObserverGuard::Observe(), OperatorObserverGuard::Outer::hears_too);
}

void StepCheck::journal_capture(std::optional<OperatorObserverGuard>& guard, std::int64_t steps_done) const {
  if (journals(steps_done)) {
    guard.emplace(observer());
  }
}

}  // namespace sidestream
