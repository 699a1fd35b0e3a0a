#include "graphs/engine/eager_calls.h"

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
    case EagerCause::other_mode:
      return "because training flags or module options differ from the capture's";
  }
  return "";
}

EagerCause cause_on_this_thread() {
  if (torch::autograd::get_current_node() != nullptr) {
    return EagerCause::in_backward;
  }
  return at::GradMode::is_enabled() ? EagerCause::eval_mode : EagerCause::no_grad;
}

}  // namespace sidestream
