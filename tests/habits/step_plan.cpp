#include "habits/step_plan.h"

#include "habits/small_model.h"

namespace sidestream::habits {

StepPlan plan_of(const Action& action) {
  StepPlan plan;
  const std::int64_t a = action.a;
  switch (action.kind) {
    case Kind::other_rows:
      plan.rows = a == 0 ? 2 : 6;
      break;
    case Kind::accumulate:
      plan.microbatches = 2 + a;
      break;
    case Kind::in_flight:
      plan.microbatches = 2 + a;
      plan.in_flight = true;
      plan.backward_in_forward_order = action.b == 1;
      break;
    case Kind::clip:
      plan.clip = true;
      break;
    case Kind::evaluate:
      plan.training = false;
      plan.grad = a == 0 ? StepPlan::Grad::on : a == 1 ? StepPlan::Grad::off_in_step : StepPlan::Grad::off_around_step;
      plan.rows = action.b == 0 ? 4 : 6;
      break;
    case Kind::validate_between:
      plan.validate_first = true;
      if (a == 1) {  // between steps
        plan.in_step = false;
        plan.backward = false;
        plan.training = false;
        plan.grad = StepPlan::Grad::off_in_step;
      }
      plan.rows = action.b == 0 ? 4 : 3;
      break;
    case Kind::inference:
      plan.training = false;
      plan.grad = StepPlan::Grad::inference;
      plan.in_step = a == 0;
      break;
    case Kind::aliased_argument:
      plan.context = StepPlan::Context::same_tensor;
      break;
    case Kind::memory:
      plan.context = StepPlan::Context::memory;
      plan.keep_output = 1;
      break;
    case Kind::other_scale:
      plan.scale = a == 0 ? 0.5 : 2.0;
      break;
    case Kind::inplace_on_output:
      plan.inplace_on_output = a;
      break;
    case Kind::leave_step:
      plan.leave_at = a;
      break;
    case Kind::throw_in_body:
      plan.throw_in_body = a;
      break;
    case Kind::keep_output:
      plan.keep_output = a;
      break;
    case Kind::late_call:
      plan.late_call = true;
      break;
    case Kind::skip_block:
      plan.skip = a;
      break;
    case Kind::repeat_block:
      plan.repeat = a;
      break;
    case Kind::unused_output:
      plan.unused_output = a;
      break;
    case Kind::unused_aux:
      plan.use_aux = false;
      break;
    case Kind::input_gradient:
      plan.input_gradient = true;
      break;
    case Kind::autocast:
      plan.autocast = a == 0 ? StepPlan::Autocast::on : StepPlan::Autocast::without_cache;
      break;
    case Kind::backward_after_step:
      plan.backward_after_step = true;
      break;
    case Kind::backward_twice:
      plan.backward_twice = true;
      break;
    case Kind::no_grad_prefix:
      plan.no_grad_prefix = true;
      break;
    case Kind::other_stream:
      plan.other_stream = true;
      break;
    case Kind::other_thread:
      plan.other_thread = true;
      break;
    case Kind::change_weight_before_backward:
      plan.change_weight = a;
      break;
    case Kind::forward_only:
      plan.backward = false;
      break;
    case Kind::keep_gradients:
      plan.keep_gradients = a == 0;
      plan.zero_in_place = a == 1;
      break;
    case Kind::nested_engine:
      plan.nested = a != 1;
      plan.crossed = a == 2;
      plan.teach = a == 1;
      break;
    case Kind::hook_on_output:
      plan.hook_on_output = a;
      break;
    case Kind::some_gradients:
      plan.some_gradients = true;
      plan.input_gradient = a == 1;
      break;
    case Kind::gradient_penalty:
      plan.gradient_penalty = true;
      break;
    case Kind::restrided_argument:
      plan.restride = a;
      plan.rows = a == 1 ? kWidth : plan.rows;
      break;
    case Kind::engine_gone:
      plan.engine_gone = true;
      plan.backward_after_step = true;
      break;
    case Kind::shared_weight:
      plan.shared_weight = a;
      break;
    case Kind::validate_pending:
      plan.validate_pending = true;
      plan.pending_in_eval = a == 0;
      plan.pending_rows = action.b == 0 ? 4 : 6;
      break;
    case Kind::buckets:
      plan.buckets = a;
      plan.inside = action.b == 1;
      break;
    case Kind::whole_step:
      plan.whole_step = a;
      plan.inside = action.b == 1;
      break;
    case Kind::struct_argument:
      plan.as_struct = true;
      plan.scale = a == 0 ? 1 : 0.5;
      break;
    case Kind::empty_step:
      plan.empty = true;
      break;
    case Kind::keep_loss:
      plan.keep_loss = true;
      plan.backward = false;
      break;
    default:
      break;
  }
  return plan;
}

}  // namespace sidestream::habits
