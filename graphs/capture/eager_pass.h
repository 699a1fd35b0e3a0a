#pragma once
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "analysis/copy_pace.h"
#include "graphs/guards/call_spec.h"
#include "runtime/runtime.h"
#include "runtime/weak_storage_set.h"
#include "sidestream/capture_time_hooks.h"
#include "sidestream/detail/argument_parts.h"

namespace sidestream {

/// Times one eager pass of a call on the current stream, by the device's own clock.
class PassClock {
 public:
  /// `runtime` must outlive this object.
  explicit PassClock(Runtime& runtime)
      : runtime_(&runtime),
        begin_(runtime.create_event(EventTiming::on)),
        forward_end_(runtime.create_event(EventTiming::on)),
        turn_(runtime.create_event(EventTiming::on)),
        end_(runtime.create_event(EventTiming::on)) {}

  void forward_begins() { runtime_->record(begin_, runtime_->current_stream()); }
  void forward_ended() { runtime_->record(forward_end_, runtime_->current_stream()); }
  void backward_begins() { runtime_->record(turn_, runtime_->current_stream()); }
  void ended() { runtime_->record(end_, runtime_->current_stream()); }
  /// Of a pass that has ended. Blocks the host until the device has finished it.
  [[nodiscard]] LayerPace pace() {
    runtime_->synchronize(end_);
    constexpr double kMillisecond = 1e-3;
    return {runtime_->elapsed_ms(begin_, forward_end_) * kMillisecond,
            runtime_->elapsed_ms(turn_, end_) * kMillisecond};
  }

 private:
  Runtime* runtime_;
  Event begin_;
  Event forward_end_;
  Event turn_;
  Event end_;
};

/// Runs the hooks of one callable around its passes. What hooks do is not recorded, sized or put back as part of the pass. A capture may
/// read what they touch.
/// Capture: illegal, unless there are no hooks.
class PassHooks {
 public:
  /// Both must outlive this object; `hooks` may be null.
  PassHooks(const CaptureTimeHooks* hooks, WeakStorageSet& met) noexcept : hooks_(hooks), met_(met) {}

  void before_forward() const;
  void after_forward() const;
  void before_backward() const;
  void after_backward() const;

 private:
  void run(const std::function<void()>& hook) const;

  const CaptureTimeHooks* hooks_;
  WeakStorageSet& met_;
};

/// Runs the body of `spec` once in the state of the call: forward, then backward with ones as the gradients of its outputs. Returns the
/// outputs. `wanted` returns the leaves whose gradients are computed. It is called before the forward, and again after it, because the
/// forward may have found more leaves. `used`, unless null, gets for each leaf of the second call whether it has a gradient. `clock`,
/// unless null, times the pass without the hooks. `.grad` is not changed.
/// Throws: CaptureError if a backward adds into `.grad` itself or an argument has hooks; errors of the body.
[[nodiscard]] detail::TensorBuffer eager_pass(const CallSpec& spec, const std::vector<at::Tensor>& inputs,
                                              const std::function<std::vector<at::Tensor>()>& wanted,
                                              const PassHooks& hooks, std::vector<bool>* used,
                                              PassClock* clock = nullptr);

}  // namespace sidestream
