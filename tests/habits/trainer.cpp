#include "habits/trainer.h"

#include <exception>
#include <optional>
#include <thread>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

namespace sidestream::habits {

const std::vector<Form>& forms() {
  static const std::vector<Form> all = {
      {"graphs_2", "blocks.*", "**", 2, false, false, false},
      {"graphs_1", "blocks.*", "**", 1, false, false, false},
      {"graphs_3", "blocks.*", "blocks.*.fc*", 3, false, false, false},
      {"accumulating", "blocks.*", "**", 2, true, false, false},
      {"eager", "", "**", 2, false, false, false},
      {"mixed", "blocks.0", "**", 2, false, false, false},
      {"eager_on_new_arguments", "blocks.*", "**", 2, false, true, false},
      {"retaining", "blocks.*", "", 2, false, false, true},
      {"evaluating", "blocks.*", "blocks.*.fc*", 2, false, false, false, true},
      {"sharing", "blocks.*", "", 2, false, false, false, true, true},
      {"few_captures", "blocks.*", "**", 2, false, false, false, true, true, 2},
      {"delaying", "blocks.*", "**", 2, false, false, false, false, false, 0, "**"},
      {"delaying_matrices", "blocks.*", "blocks.*.fc*", 1, false, false, false, true, false, 0, "blocks.*.fc*"},
      {"delaying_one", "blocks.0", "**", 3, false, false, false, false, false, 0, "blocks.0.*"},
  };
  return all;
}

const char* name_of(CallClass call) {
  switch (call) {
    case CallClass::sizing:
      return "sizing";
    case CallClass::without_gradients:
      return "without gradients";
    case CallClass::in_eval:
      return "in eval";
    case CallClass::first_of_its_kind:
      return "first of its kind";
    case CallClass::by_option:
      return "eager by option";
    case CallClass::in_steps_of_chunks:
      return "in steps of chunks";
    case CallClass::known:
      return "known";
  }
  return "";
}

Trainer::Trainer(const Setup& setup, c10::Device device, bool with_engine)
    : setup_(setup),
      device_(device),
      with_engine_(with_engine),
      runtime_(make_runtime(device)),
      model_(std::make_unique<SmallModel>(setup, device)),
      other_stream_(runtime_->create_stream()) {
  make_engine();
}

Trainer::~Trainer() {
  second_.reset();
  engine_.reset();
  try {
    runtime_->synchronize_device();
  } catch (const std::exception&) {  // told of already
  }
}

void Trainer::make_engine() {
  known_.clear();
  sized_ = false;
  if (!with_engine_) {
    return;
  }
  engine_.reset();
  const Form& form = forms()[static_cast<std::size_t>(setup_.form)];
  Options options(device_);
  GraphOptions graph;
  graph.num_warmup_iters(1)
      .side_streams(form.side_streams)
      .gradients("**", form.accumulate ? GradientPolicy::accumulated : GradientPolicy::cloned)
      .retain_graph_in_backward(form.retain)
      .allow_unused_input(true);
  if (delays()) {
    graph.gradients(form.delayed, GradientPolicy::delayed);
  }
  options.min_bytes(1).graph_options(graph).call_options(
      CallOptions()
          .max_captures(form.max_captures > 0 ? form.max_captures : 256)
          .on_max_captures(form.max_captures > 0 ? OnMaxCaptures::drop_least_used : OnMaxCaptures::eager)
          .on_new_arguments(form.eager_on_new_arguments ? OnNewArguments::eager : OnNewArguments::capture)
          .share_memory(form.shares)
          .on_evaluation(form.evaluates ? OnEvaluation::capture : OnEvaluation::eager));
  if (*form.graph != '\0') {
    options.graph(form.graph);
  }
  if (*form.offload != '\0') {
    options.offload(form.offload);
  }
  engine_ = std::make_unique<OffloadEngine>(*model_, options);
}

Trainer& Trainer::second() {
  if (second_ == nullptr) {
    at::Generator generator = at::globalContext().defaultGenerator(device_);
    const at::Tensor before = generator.get_state();
    generator.set_current_seed(9);
    second_ = std::make_unique<Trainer>(Setup{{1}, setup_.form}, device_, with_engine_);
    generator.set_state(before);
  }
  return *second_;
}

void Trainer::set_flags(bool training) {
  model_->train(training);
  if (training && part_in_eval_ >= 0 && part_in_eval_ < static_cast<std::int64_t>(model_->blocks.size())) {
    model_->blocks[static_cast<std::size_t>(part_in_eval_)]->eval();
  }
}

void Trainer::prepare_gradients(const StepPlan& plan) {
  if (plan.keep_gradients) {
    return;
  }
  for (at::Tensor& parameter : model_->parameters()) {
    if (plan.zero_in_place && parameter.grad().defined()) {
      parameter.mutable_grad().zero_();
    } else {
      parameter.mutable_grad() = at::Tensor();
    }
  }
}

template <class Make>
void prepare(std::unique_ptr<CapturedTrainer>& trainer, const Make& make, const Setup& setup, c10::Device device,
             bool with_engine) {
  if (trainer == nullptr) {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    const at::Tensor before = generator.get_state();
    generator.set_current_seed(11);
    trainer = make(setup, device, with_engine);
    generator.set_state(before);
  }
  trainer->prepare();
}

void Trainer::prepare_captured(const StepPlan& plan) {
  if (plan.buckets >= 0) {
    prepare(buckets_, make_bucket_trainer, setup_, device_, with_engine_);
  }
  if (plan.whole_step >= 0) {
    prepare(whole_steps_, make_whole_step_trainer, setup_, device_, with_engine_);
  }
}

void Trainer::train_captured(const StepPlan& plan) {
  if (plan.buckets >= 0) {
    buckets_->step(plan);
  }
  if (plan.whole_step >= 0) {
    whole_steps_->step(plan);
  }
}

void Trainer::step(const StepPlan& given) {
  StepPlan plan = given;
  if (delays()) {  // documented otherwise: the calls' weights are no leaves of autograd, and their gradients need the engine's step
    plan.some_gradients = plan.engine_gone = plan.crossed = false;
  }
  if (form().accumulate && plan.chunks) {
    plan.repeat = -1;  // documented: graphs add into .grad one by one, and plain training adds the sum of a backward
  }
  began_ = missed_weights_ = caught_ = after_one_backward_ = false;
  losses_.clear();
  inputs_.clear();
  delayed_.clear();
  next_call_ = 0;
  if (with_engine_) {
    delayed_calls_.clear();
  }
  if (plan.nested || plan.teach) {
    second();
  }
  prepare_captured(plan);
  if ((plan.buckets >= 0 || plan.whole_step >= 0) && !plan.inside) {
    began_ = true;
    train_captured(plan);
    return;
  }
  const at::Tensor kept_loss = std::exchange(kept_loss_, at::Tensor());  // until this step has ended
  prepare_gradients(plan);
  set_flags(plan.training);
  std::exception_ptr error;
  const auto run = [&] {
    try {
      run_step(plan);
    } catch (...) {
      error = std::current_exception();
    }
  };
  if (plan.other_thread) {
    std::thread(run).join();
  } else {
    run();
  }
  end_of_step();
  if (began_ && plan.in_step && weight_time_ == WeightTime::forgotten && !plan.deviates()) {
    weight_time_ = WeightTime::at_once;
  }
  set_flags(true);
  if (error != nullptr) {
    std::rethrow_exception(error);
  }
  if (plan.training && plan.grad == StepPlan::Grad::on && plan.backward && !plan.empty) {
    if (plan.clip) {
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : model_->parameters()) {
        if (parameter.grad().defined()) {
          const double norm = parameter.grad().norm().item<double>();
          parameter.mutable_grad().mul_(norm > 0.1 ? 0.1 / norm : 1.0);
        }
      }
    }
    descend(*model_);
  }
}

void Trainer::run_step(const StepPlan& plan) {
  std::optional<StreamGuard> on_stream;
  const c10::Stream main = runtime_->current_stream();
  const auto order = [&](c10::Stream earlier, c10::Stream later) {
    const Event event = runtime_->create_event();
    runtime_->record(event, earlier);
    runtime_->wait(later, event);
    runtime_->synchronize(event);
  };
  if (plan.other_stream) {
    order(main, other_stream_.get());
    on_stream.emplace(*runtime_, other_stream_.get());
  }
  std::optional<c10::InferenceMode> inference;
  std::optional<at::NoGradGuard> no_grad;
  if (plan.grad == StepPlan::Grad::inference) {
    inference.emplace();
  } else if (plan.grad == StepPlan::Grad::off_around_step) {
    no_grad.emplace();
  }
  std::exception_ptr error;
  std::vector<at::Tensor> left;
  try {
    if (engine_ != nullptr && plan.in_step) {
      auto step = begin_step(plan);
      began_ = true;
      in_step_ = true;
      end_step_ = [&] {
        finish_step(step, plan);
        in_step_ = false;
      };
      if (begun_) {
        begun_();
      }
      forwards_and_backwards(plan, left);
      end_step_();
    } else {
      began_ = true;
      forwards_and_backwards(plan, left);
      missed_weights_ = !delayed_.empty();
    }
    if (plan.engine_gone) {
      engine_.reset();
    }
    for (const at::Tensor& loss : left) {
      backward(loss, plan);
      if (delays()) {
        compute_weights(std::nullopt);
      }
    }
  } catch (...) {
    error = std::current_exception();
  }
  in_step_ = false;
  end_step_ = nullptr;
  left.clear();
  open_.clear();
  chunk_.reset();
  if (plan.engine_gone) {
    make_engine();
  }
  on_stream.reset();
  if (plan.other_stream) {
    order(other_stream_.get(), main);
  }
  if (error != nullptr) {
    std::rethrow_exception(error);
  }
}

void Trainer::count_call(std::size_t index, const at::Tensor& h, const at::Tensor& context, const StepPlan& plan) {
  const Form& form = forms()[static_cast<std::size_t>(setup_.form)];
  const bool graphed = *form.graph == '\0' ? false : std::string(form.graph) == "blocks.*" || index == 0;
  if (!graphed) {
    return;
  }
  const auto counted = [&](CallClass call) { ++calls_[static_cast<std::size_t>(call)]; };
  if (plan.chunks) {
    counted(CallClass::in_steps_of_chunks);
    return;
  }
  const bool evaluation = !at::GradMode::is_enabled();
  open_calls_.resize(model_->blocks.size() + 1, 0);
  if (evaluation && (!form.evaluates || c10::InferenceMode::is_enabled() || open_calls_[index] > 0)) {
    counted(CallClass::without_gradients);
    return;
  }
  const Block& block = index < model_->blocks.size() ? *model_->blocks[index] : *model_->late;
  if (!evaluation && !block.is_training()) {
    counted(CallClass::in_eval);
    return;
  }
  if (sized_ && form.max_captures > 0) {
    counted(CallClass::by_option);
    return;
  }
  std::string key = std::to_string(index) + '/' + (evaluation ? "-" : std::to_string(open_calls_[index]++)) + '/' +
                    std::to_string(h.size(0)) + '/' + std::to_string(plan.scale) + (plan.as_struct ? "s/" : "/") +
                    std::to_string(h.requires_grad()) + std::to_string(context.requires_grad()) +
                    std::to_string(context.is_same(h)) + '/' + std::to_string(static_cast<int>(plan.autocast)) + '/' +
                    c10::toString(h.scalar_type());
  for (const at::Tensor& parameter : block.parameters()) {
    key += parameter.requires_grad() ? 'g' : '-';
  }
  for (const auto& module : block.modules()) {
    key += module->is_training() ? 't' : 'e';
  }
  key += block.drop ? std::to_string(block.drop->options.p()) : "";
  key += at::globalContext().deterministicAlgorithms() ? "/deterministic/" : "/";
  key += c10::get_default_dtype().name();
  if (!sized_) {
    counted(CallClass::sizing);
    seen_in_step_.insert(key);
  } else if (known_.count(key) != 0) {
    counted(CallClass::known);
  } else if (form.eager_on_new_arguments) {
    counted(CallClass::by_option);
  } else {
    counted(CallClass::first_of_its_kind);
    seen_in_step_.insert(key);
  }
}

void Trainer::end_of_step() noexcept {
  known_.insert(seen_in_step_.begin(), seen_in_step_.end());
  seen_in_step_.clear();
  open_calls_.clear();
  sized_ = sized_ || (engine_ != nullptr && engine_->report().steps > 0);
}

std::array<std::int64_t, kCallClasses> Trainer::take_calls() { return std::exchange(calls_, {}); }

}  // namespace sidestream::habits
