#include "graphs/calls/engine_counts.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>

namespace sidestream {

const char* text_of(EagerCause cause) {
  switch (cause) {
    case EagerCause::no_grad:
      return "under no_grad or in inference mode (a validation pass, or the forward of a checkpoint; the checkpoint's "
             "recomputation in backward is not a graph either)";
    case EagerCause::eval_mode:
      return "in eval mode";
    case EagerCause::in_backward:
      return "inside of a backward (a checkpoint?)";
    case EagerCause::new_arguments:
      return "with arguments that match no capture (CallOptions::on_new_arguments)";
    case EagerCause::over_bound:
      return "because CallOptions::max_captures was reached";
    case EagerCause::unequal:
      return "with an argument that compares unequal to its own copy";
    case EagerCause::shared_memory:
      return "while the backward of another capture in the same memory was pending";
    case EagerCause::no_bucket:
      return "with inputs that fit no bucket (BucketOptions::on_unknown_shape)";
    case EagerCause::not_agreed:
      return "because GraphOptions::agree_to_capture returned false";
    case EagerCause::other_mode:
      return "because training flags or module options differ from the capture's";
    case EagerCause::after_eager_call:
      return "because a callable whose output they are linked to ran eagerly";
    case EagerCause::with_gradients:
      return "with gradients enabled, although captured for no_grad (GraphOptions::forward_only)";
  }
  return "";
}

EagerCause cause_on_this_thread(EagerCause otherwise) {
  if (torch::autograd::get_current_node() != nullptr) {
    return EagerCause::in_backward;
  }
  return at::GradMode::is_enabled() ? otherwise : EagerCause::no_grad;
}

void EngineCounts::captured(const GraphSequence& sequence) {
  for (const CapturedCall& call : sequence.captured().calls) {
    report.captures += call.has_backward ? 2 : 1;
  }
}

void EngineCounts::replayed(const GraphSequence::Counts& counts) {
  report.replays = static_cast<std::int64_t>(counts.replays);
  report.outputs_reused = static_cast<std::int64_t>(counts.outputs.reused);
  report.outputs_copied = static_cast<std::int64_t>(counts.outputs.copied);
  report.outputs_copied_bytes = static_cast<std::int64_t>(counts.outputs.copied_bytes);
  report.gradients_copied = static_cast<std::int64_t>(counts.gradients.copied);
  report.gradients_copied_bytes = static_cast<std::int64_t>(counts.gradients.copied_bytes);
  report.unused_outputs = static_cast<std::int64_t>(counts.unused_outputs);
}

void EngineCounts::sizing_ended(const SavedTensorRecorder& recorder, std::int64_t peak_without_offload) {
  report.first_step_peak_bytes = report.step_peak_bytes;
  report.sizing_peak_bytes = peak_without_offload;
  report.saved_bytes = static_cast<std::int64_t>(recorder.saved_bytes());
}

void EngineCounts::copied(const CopyCounts& copies) noexcept {
  report.offloaded_bytes = static_cast<std::int64_t>(copies.offloaded_bytes);
  report.reloaded_bytes = static_cast<std::int64_t>(copies.reloaded_bytes);
  report.waits = static_cast<std::int64_t>(copies.waits);
  report.inline_reloads = static_cast<std::int64_t>(copies.inline_reloads);
}

void EngineCounts::step_ended(const SavedTensorRecorder& recorder, const CopyCounts& copies,
                              const LiveMemory::Peak& peak) {
  copied(copies);
  const SavedTensorRecorder::Counts counts = recorder.counts();
  report.copied_twice_bytes = static_cast<std::int64_t>(counts.copied_twice_bytes);
  report.unplanned_bytes = static_cast<std::int64_t>(counts.unplanned_bytes);
  report.refused_bytes = static_cast<std::int64_t>(counts.refused_bytes);
  report.step_peak_bytes = peak.live;
  report.in_flight_bytes = peak.in_flight;
}

}  // namespace sidestream
