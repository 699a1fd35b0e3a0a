#include "graphs/engine/eager_calls.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>

namespace sidestream {

const char* text_of(EagerCause cause) {
  switch (cause) {
    case EagerCause::no_grad:
      return "under no_grad or in inference mode (a validation pass, or the forward of a checkpoint: what runs again "
             "inside of "
             "its backward is no graph either)";
    case EagerCause::eval_mode:
      return "in eval mode";
    case EagerCause::in_backward:
      return "inside of a backward (a checkpoint?)";
    case EagerCause::new_arguments:
      return "with arguments that fit no capture (CallOptions::on_new_arguments)";
    case EagerCause::over_bound:
      return "with as many captures as CallOptions::max_captures allows";
    case EagerCause::unequal:
      return "with an argument that differs from its own copy";
    case EagerCause::shared_memory:
      return "while a backward was pending of another capture in the same memory";
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
