// What a step computes: forwards through the blocks' calls, and backwards.
#include <optional>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include "autocast_region.h"
#include "habits/trainer.h"
#include "sidestream/call.h"
#include "sidestream/scope.h"

namespace sidestream::habits {

void Trainer::forwards_and_backwards(const StepPlan& plan, std::vector<at::Tensor>& left) {
  std::optional<at::NoGradGuard> no_grad;
  if (plan.grad == StepPlan::Grad::off_in_step) {
    no_grad.emplace();
  }
  if (plan.validate_first) {
    const at::NoGradGuard validating;
    model_->eval();
    StepPlan validation = plan;
    validation.leave_at = -1;
    validation.throw_in_body = -1;
    validation.training = false;
    losses_.push_back(forward(validation, 17).detach());
    set_flags(plan.training);
  }
  if (plan.teach) {
    const at::NoGradGuard teaching;
    const auto& teacher = second_->model_->blocks[0];
    teacher->eval();
    const at::Tensor x = rows_of(plan.data + 23, plan.rows, device_).to(teacher->parameters()[0].dtype());
    losses_.push_back(std::get<0>(call(teacher, x, x, 1.0)).detach());
    teacher->train();
  }
  if (plan.empty) {
    return;
  }
  if (plan.chunks) {
    run_chunks(plan);
    return;
  }
  std::vector<at::Tensor> flying;
  for (std::int64_t m = 0; m < plan.microbatches; ++m) {
    const at::Tensor loss = forward(plan, m);
    losses_.push_back(loss.detach());
    if (plan.keep_loss) {
      kept_loss_ = loss;
    }
    if (!plan.backward || plan.grad != StepPlan::Grad::on) {
      continue;
    }
    if (plan.in_flight || plan.backward_after_step) {
      flying.push_back(loss);
    } else {
      backward(loss, plan);
      compute_weights_after_backward(std::nullopt);
      if (!delays() || weight_time_ == WeightTime::at_once) {
        open_calls_.clear();
      }
    }
  }
  if (plan.backward_after_step) {
    left = std::move(flying);
    return;
  }
  if (!plan.backward_in_forward_order) {
    std::vector<at::Tensor>(flying.rbegin(), flying.rend()).swap(flying);
  }
  for (at::Tensor& loss : flying) {
    backward(loss, plan);
    loss.reset();
    compute_weights_after_backward(std::nullopt);
  }
  compute_weights_at_end();
}

void Trainer::backward(const at::Tensor& loss, const StepPlan& plan) {
  if (plan.nested) {
    StepPlan own;
    own.data = plan.data + 31;
    if (plan.crossed) {
      second_->begun_ = end_step_;
    }
    second_->step(own);
    second_->begun_ = nullptr;
  }
  if (plan.validate_pending) {
    const at::NoGradGuard validating;
    if (plan.pending_in_eval) {
      model_->eval();
    }
    StepPlan validation;
    validation.data = plan.data + 29;
    validation.rows = plan.pending_rows;
    losses_.push_back(forward(validation, 19).detach());
    set_flags(plan.training);
  }
  if (plan.inside) {
    train_captured(plan);
  }
  if (plan.change_weight >= 0) {
    const at::NoGradGuard no_grad;
    model_->blocks[static_cast<std::size_t>(plan.change_weight) % model_->blocks.size()]->parameters()[1].mul_(1.01);
  }
  if (plan.backward_twice) {
    loss.backward({}, /*retain_graph=*/true);
  }
  if (plan.some_gradients) {
    std::vector<at::Tensor> wanted = inputs_;
    if (model_->stem.requires_grad()) {
      wanted.push_back(model_->stem);
    }
    if (!wanted.empty()) {
      for (const at::Tensor& gradient : torch::autograd::grad({loss}, wanted)) {
        losses_.push_back(gradient.detach().clone());
      }
    }
  } else if (plan.gradient_penalty && model_->stem.requires_grad()) {
    const at::Tensor gradient =
        torch::autograd::grad({loss}, {model_->stem}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    (loss + gradient.square().sum()).backward();
  } else {
    loss.backward();
  }
  if (plan.leave_at == static_cast<std::int64_t>(model_->blocks.size()) + 1) {
    throw Left();
  }
}

Trainer::Pass Trainer::begin_pass(const StepPlan& plan, std::int64_t microbatch) {
  const auto dtype = model_->stem.dtype();
  at::Tensor x = rows_of(3 * (plan.data + 50 * microbatch), plan.rows, device_).to(dtype);
  const at::Tensor target = rows_of(3 * (plan.data + 50 * microbatch) + 1, plan.rows, device_).to(dtype);
  const at::Tensor data = rows_of(3 * (plan.data + 50 * microbatch) + 2, plan.rows, device_).to(dtype);
  if (plan.input_gradient) {
    x.requires_grad_(true);
    inputs_.push_back(x);
  }
  return {x, data, target, {}};
}

at::Tensor Trainer::forward(const StepPlan& plan, std::int64_t microbatch) {
  Pass pass = begin_pass(plan, microbatch);
  std::optional<testing_model::AutocastRegion> region;
  if (plan.autocast != StepPlan::Autocast::off) {
    region.emplace(device_.type(), /*cache=*/plan.autocast == StepPlan::Autocast::on);
  }
  pass_stem(pass);
  const std::size_t count = model_->blocks.size() + (plan.late_call ? 1 : 0);
  for (std::size_t i = 0; i < count; ++i) {
    pass_block(pass, i, plan);
  }
  if (plan.leave_at == static_cast<std::int64_t>(model_->blocks.size())) {
    throw Left();
  }
  return pass_head(pass, plan);
}

void Trainer::pass_stem(Pass& pass) {
  const OffloadScope scope("stem");
  pass.h = at::linear(pass.h, model_->stem).tanh();
}

void Trainer::pass_block(Pass& pass, std::size_t i, const StepPlan& plan) {
  at::Tensor& h = pass.h;
  const auto is = [i](std::int64_t chosen) { return chosen == static_cast<std::int64_t>(i); };
  if (is(plan.leave_at)) {
    throw Left();
  }
  if (is(plan.skip)) {
    return;
  }
  Block& block = i < model_->blocks.size() ? *model_->blocks[i] : *model_->late;
  at::Tensor context = pass.data;
  if (plan.context == StepPlan::Context::same_tensor) {
    context = h;
  } else if (plan.context == StepPlan::Context::memory && !kept_.empty() && kept_.back().size(0) == plan.rows &&
             kept_.back().scalar_type() == h.scalar_type()) {
    context = kept_.back();
  }
  std::optional<at::NoGradGuard> no_grad;
  if (plan.no_grad_prefix && i == 0) {
    no_grad.emplace();
  }
  if (plan.restride == 0) {
    context = context.t().contiguous().t();
  } else if (plan.restride == 1) {
    h = h.t();
  }
  if (is(plan.unused_output)) {
    (void)call_block(i, block, h, context, plan);
  }
  for (int times = is(plan.repeat) ? 2 : 1; times > 0; --times) {
    auto [out, aux] = call_block(i, block, h, context, plan);
    h = out;
    if (is(plan.hook_on_output) && h.requires_grad()) {
      h.register_hook([](const at::Tensor& gradient) { return gradient * 1.5; });
    }
    if (is(plan.inplace_on_output)) {
      h.mul_(0.5);
    }
    if (plan.use_aux) {
      pass.add(aux.to(at::kFloat).square().mean() * 0.1);
    }
  }
  if (is(plan.keep_output)) {
    kept_.push_back(h.detach());
    if (kept_.size() > 3) {
      kept_.erase(kept_.begin());
    }
  }
}

at::Tensor Trainer::pass_head(Pass& pass, const StepPlan& plan) {
  const OffloadScope scope("head");
  at::Tensor y = at::linear(pass.h, model_->head);
  if (plan.shared_weight >= 0) {
    const auto shared = static_cast<std::size_t>(plan.shared_weight) % model_->blocks.size();
    y = y * model_->blocks[shared]->parameters()[0];
  }
  pass.add((y * pass.target).to(at::kFloat).mean());
  pass.add(y.to(at::kFloat).square().mean() * 0.1);
  return pass.loss;
}

std::pair<at::Tensor, at::Tensor> Trainer::call_block(std::size_t index, Block& block, const at::Tensor& h,
                                                      const at::Tensor& context, const StepPlan& plan) {
  if (plan.throw_in_body == static_cast<std::int64_t>(index)) {
    block.throws = true;
  }
  if (in_step_) {
    count_call(index, h, context, plan);
  }
  if (!with_engine_ && delays()) {
    block.read(delayed_reads(index));
  }
  const std::int64_t runs = block.runs;
  const std::size_t number = delayed_calls_.size();
  if (with_engine_) {
    delayed_calls_.push_back(false);  // also of a call that throws: the twin counts it
  }
  const Beside beside{context, plan.scale};
  auto [out, aux] = plan.as_struct ? call(&block, h, &beside) : call(&block, h, context, plan.scale);
  block.throws = false;
  if (with_engine_) {
    delayed_calls_[number] = block.runs == runs;
    if (plan.chunks && at::GradMode::is_enabled() && (std::string_view(form().graph) == "blocks.*" || index == 0)) {
      seen_.add(block.runs == runs ? "calls in chunks replayed" : "calls in chunks run");
    }
  }
  return {out, aux};
}

}  // namespace sidestream::habits
