#pragma once
#include "analysis/copy_pace.h"
#include "runtime/runtime.h"

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
  /// Of a pass that has ended. Blocks the host until the device has done it.
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

}  // namespace sidestream
