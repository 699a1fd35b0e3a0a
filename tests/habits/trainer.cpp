#include "habits/trainer.h"

#include <exception>
#include <optional>
#include <thread>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/utils.h>

#include "sidestream/call.h"
#include "sidestream/error.h"
#include "sidestream/scope.h"

namespace sidestream::habits {
namespace {

at::Tensor rows_of(std::int64_t number, std::int64_t rows, c10::Device device) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(7000 + number));
  return at::randn({rows, kWidth}, generator, at::TensorOptions().dtype(at::kFloat)).to(device);
}

/// Autocast for the device as a trainer sets it around forward.
class AutocastRegion {
 public:
  AutocastRegion(c10::DeviceType type, StepPlan::Autocast autocast) : type_(type), autocast_(autocast) {
    if (autocast_ != StepPlan::Autocast::off) {
      cache_before_ = at::autocast::is_autocast_cache_enabled();
      at::autocast::set_autocast_enabled(type_, true);
      at::autocast::set_autocast_dtype(type_, at::kBFloat16);
      at::autocast::set_autocast_cache_enabled(autocast_ == StepPlan::Autocast::on);
      at::autocast::increment_nesting();
    }
  }
  AutocastRegion(const AutocastRegion&) = delete;
  AutocastRegion& operator=(const AutocastRegion&) = delete;
  ~AutocastRegion() {
    if (autocast_ != StepPlan::Autocast::off) {
      if (at::autocast::decrement_nesting() == 0) {
        at::autocast::clear_cache();
      }
      at::autocast::set_autocast_enabled(type_, false);
      at::autocast::set_autocast_cache_enabled(cache_before_);
    }
  }

 private:
  c10::DeviceType type_;
  StepPlan::Autocast autocast_;
  bool cache_before_ = true;
};

}  // namespace

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
  options.min_bytes(1)
      .graph_options(GraphOptions()
                         .num_warmup_iters(1)
                         .side_streams(form.side_streams)
                         .accumulate_in_graph(form.accumulate)
                         .retain_graph_in_backward(form.retain)
                         .allow_unused_input(true))
      .call_options(CallOptions().max_captures(256).on_new_arguments(
          form.eager_on_new_arguments ? OnNewArguments::eager : OnNewArguments::capture));
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

void Trainer::descend() {
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : model_->parameters()) {
    if (parameter.grad().defined() && parameter.requires_grad()) {
      parameter.sub_(parameter.grad() * 0.05);
    }
  }
}

void Trainer::step(const StepPlan& plan) {
  began_ = false;
  losses_.clear();
  inputs_.clear();
  if (plan.nested || plan.teach) {
    second();
  }
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
  set_flags(true);
  if (error != nullptr) {
    std::rethrow_exception(error);
  }
  if (plan.training && plan.grad == StepPlan::Grad::on && plan.backward) {
    if (plan.clip) {
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : model_->parameters()) {
        if (parameter.grad().defined()) {
          const double norm = parameter.grad().norm().item<double>();
          parameter.mutable_grad().mul_(norm > 0.1 ? 0.1 / norm : 1.0);
        }
      }
    }
    descend();
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
      const auto step = engine_->step();
      began_ = true;
      in_step_ = true;
      forwards_and_backwards(plan, left);
    } else {
      began_ = true;
      forwards_and_backwards(plan, left);
    }
    in_step_ = false;
    for (const at::Tensor& loss : left) {
      backward(loss, plan);
    }
  } catch (...) {
    error = std::current_exception();
  }
  in_step_ = false;
  left.clear();
  on_stream.reset();
  if (plan.other_stream) {
    order(other_stream_.get(), main);
  }
  if (error != nullptr) {
    std::rethrow_exception(error);
  }
}

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
  std::vector<at::Tensor> flying;
  for (std::int64_t m = 0; m < plan.microbatches; ++m) {
    const at::Tensor loss = forward(plan, m);
    losses_.push_back(loss.detach());
    if (!plan.backward || plan.grad != StepPlan::Grad::on) {
      continue;
    }
    if (plan.in_flight || plan.backward_after_step) {
      flying.push_back(loss);
    } else {
      backward(loss, plan);
      open_calls_.clear();
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
  }
}

void Trainer::backward(const at::Tensor& loss, const StepPlan& plan) {
  if (plan.nested) {
    StepPlan own;
    own.data = plan.data + 31;
    second_->step(own);
  }
  if (plan.change_weight >= 0) {
    const at::NoGradGuard no_grad;
    model_->blocks[static_cast<std::size_t>(plan.change_weight) % model_->blocks.size()]->parameters()[1].mul_(1.01);
  }
  if (plan.backward_twice) {
    loss.backward({}, /*retain_graph=*/true);
  }
  loss.backward();
  if (plan.leave_at == static_cast<std::int64_t>(model_->blocks.size()) + 1) {
    throw Left();
  }
}

at::Tensor Trainer::forward(const StepPlan& plan, std::int64_t microbatch) {
  const auto dtype = model_->stem.dtype();
  at::Tensor x = rows_of(3 * (plan.data + 50 * microbatch), plan.rows, device_).to(dtype);
  const at::Tensor target = rows_of(3 * (plan.data + 50 * microbatch) + 1, plan.rows, device_).to(dtype);
  const at::Tensor data = rows_of(3 * (plan.data + 50 * microbatch) + 2, plan.rows, device_).to(dtype);
  if (plan.input_gradient) {
    x.requires_grad_(true);
    inputs_.push_back(x);
  }
  const AutocastRegion region(device_.type(), plan.autocast);
  at::Tensor h;
  {
    const OffloadScope scope("stem");
    h = at::linear(x, model_->stem).tanh();
  }
  at::Tensor loss;
  const auto add = [&](const at::Tensor& more) { loss = loss.defined() ? loss + more : more; };
  const std::size_t count = model_->blocks.size() + (plan.late_call ? 1 : 0);
  for (std::size_t i = 0; i < count; ++i) {
    const auto is = [i](std::int64_t chosen) { return chosen == static_cast<std::int64_t>(i); };
    if (is(plan.leave_at)) {
      throw Left();
    }
    if (is(plan.skip)) {
      continue;
    }
    Block& block = i < model_->blocks.size() ? *model_->blocks[i] : *model_->late;
    at::Tensor context = data;
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
    if (is(plan.unused_output)) {
      (void)call_block(i, block, h, context, plan);
    }
    for (int times = is(plan.repeat) ? 2 : 1; times > 0; --times) {
      auto [out, aux] = call_block(i, block, h, context, plan);
      h = out;
      if (is(plan.inplace_on_output)) {
        h.mul_(0.5);
      }
      if (plan.use_aux) {
        add(aux.to(at::kFloat).square().mean() * 0.1);
      }
    }
    if (is(plan.keep_output)) {
      kept_.push_back(h.detach());
      if (kept_.size() > 3) {
        kept_.erase(kept_.begin());
      }
    }
  }
  if (plan.leave_at == static_cast<std::int64_t>(model_->blocks.size())) {
    throw Left();
  }
  const OffloadScope scope("head");
  const at::Tensor y = at::linear(h, model_->head);
  add((y * target).to(at::kFloat).mean());
  add(y.to(at::kFloat).square().mean() * 0.1);
  return loss;
}

std::pair<at::Tensor, at::Tensor> Trainer::call_block(std::size_t index, Block& block, const at::Tensor& h,
                                                      const at::Tensor& context, const StepPlan& plan) {
  if (plan.throw_in_body == static_cast<std::int64_t>(index)) {
    block.throws = true;
  }
  if (in_step_) {
    count_call(index, h, context, plan);
  }
  auto [out, aux] = call(&block, h, context, plan.scale);
  block.throws = false;
  return {out, aux};
}

void Trainer::count_call(std::size_t index, const at::Tensor& h, const at::Tensor& context, const StepPlan& plan) {
  const Form& form = forms()[static_cast<std::size_t>(setup_.form)];
  const bool graphed = *form.graph == '\0' ? false : std::string(form.graph) == "blocks.*" || index == 0;
  if (!graphed) {
    return;
  }
  const auto counted = [&](CallClass call) { ++calls_[static_cast<std::size_t>(call)]; };
  if (!at::GradMode::is_enabled()) {
    counted(CallClass::without_gradients);
    return;
  }
  const Block& block = index < model_->blocks.size() ? *model_->blocks[index] : *model_->late;
  if (!block.is_training()) {
    counted(CallClass::in_eval);
    return;
  }
  open_calls_.resize(model_->blocks.size() + 1, 0);
  std::string key = std::to_string(index) + '/' + std::to_string(open_calls_[index]++) + '/' +
                    std::to_string(h.size(0)) + '/' + std::to_string(plan.scale) + '/' +
                    std::to_string(h.requires_grad()) + std::to_string(context.requires_grad()) +
                    std::to_string(context.is_same(h)) + '/' + std::to_string(static_cast<int>(plan.autocast)) + '/' +
                    c10::toString(h.scalar_type());
  for (const at::Tensor& parameter : block.parameters()) {
    key += parameter.requires_grad() ? 'g' : '-';
  }
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

void Trainer::change(const Action& action) {
  const at::NoGradGuard no_grad;
  const auto index = static_cast<std::size_t>(action.a) % model_->blocks.size();
  switch (action.kind) {
    case Kind::freeze: {
      std::vector<at::Tensor> chosen = model_->blocks[index]->parameters();
      if (action.b == 1) {
        chosen = {chosen[1]};
      } else if (action.b == 2) {
        chosen = {model_->stem};
      }
      for (at::Tensor& parameter : chosen) {
        parameter.requires_grad_(false);
      }
      break;
    }
    case Kind::thaw:
      for (at::Tensor& parameter : model_->parameters()) {
        parameter.requires_grad_(true);
      }
      break;
    case Kind::load:
      for (auto& item : model_->named_parameters()) {
        if (action.a == 0) {
          item.value().mul_(0.9);
        } else {
          item.value().copy_(item.value().clone() + 0.01);
        }
      }
      break;
    case Kind::relocate:
      for (at::Tensor& parameter : model_->blocks[index]->parameters()) {
        parameter.set_data(parameter.detach() * 0.95);
      }
      break;
    case Kind::convert:
      if (action.b == 0) {
        model_->to(action.a == 2 ? at::Device(at::kCPU) : device_);
        if (action.a != 2) {
          model_->to(at::kDouble);
        }
      } else {
        model_->to(device_);
        model_->to(at::kFloat);
      }
      break;
    case Kind::replace_module:
      model_->replace(index);
      break;
    case Kind::part_in_eval:
      part_in_eval_ = action.a - 1;
      set_flags(true);
      break;
    case Kind::add_hook: {
      const at::AutoGradMode with_grad(true);
      at::Tensor parameter = model_->blocks[index]->parameters()[1];
      if (!parameter.requires_grad() || form().accumulate) {  // graphs that own the gradients run no hooks
        break;
      }
      const double factor = action.b == 0 ? 2.0 : 0.5;
      hooks_.push_back(
          {parameter, parameter.register_hook([factor](const at::Tensor& grad) { return grad * factor; })});
      break;
    }
    case Kind::remove_hook:
      if (!hooks_.empty()) {
        hooks_.back().parameter.remove_hook(hooks_.back().handle);
        hooks_.pop_back();
      }
      break;
    case Kind::reset:
      known_.clear();
      sized_ = false;
      if (engine_ != nullptr) {
        engine_->reset();
      }
      break;
    case Kind::new_engine:
      make_engine();
      break;
    case Kind::report:
      if (engine_ != nullptr) {
        (void)engine_->report();
      }
      break;
    default:
      break;
  }
}

std::vector<std::pair<std::string, at::Tensor>> Trainer::state() const {
  std::vector<std::pair<std::string, at::Tensor>> all;
  for (const auto& item : model_->named_parameters()) {
    all.emplace_back("gradient of " + item.key(), item.value().grad());
  }
  for (const auto& item : model_->named_parameters()) {
    all.emplace_back(item.key(), item.value().detach());
  }
  for (const auto& item : model_->named_buffers()) {
    all.emplace_back("buffer " + item.key(), item.value());
  }
  for (const auto& block : model_->blocks) {
    for (const at::Tensor& tensor : block->unregistered()) {
      all.emplace_back("unregistered tensor", tensor);
    }
  }
  const auto list = [&](const char* name, const std::vector<at::Tensor>& tensors) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      all.emplace_back(name + std::to_string(i), tensors[i]);
    }
  };
  list("loss ", losses_);
  list("kept output ", kept_);
  for (std::size_t i = 0; i < inputs_.size(); ++i) {
    all.emplace_back("gradient of input " + std::to_string(i), inputs_[i].grad());
  }
  all.emplace_back("the generator's state", random);
  if (second_ != nullptr) {
    for (auto& item : second_->state()) {
      if (item.first != "the generator's state") {
        all.emplace_back("second model: " + item.first, std::move(item.second));
      }
    }
  }
  return all;
}

void Trainer::forget_inputs() {
  inputs_.clear();
  if (second_ != nullptr) {
    second_->forget_inputs();
  }
}

void Trainer::become(const Trainer& other) {
  const at::NoGradGuard no_grad;
  auto theirs = other.model_->parameters();
  auto mine = model_->parameters();
  for (std::size_t i = 0; i < mine.size(); ++i) {
    mine[i].detach().copy_(theirs[i].detach());
    mine[i].mutable_grad() = theirs[i].grad().defined() ? theirs[i].grad().clone() : at::Tensor();
  }
  theirs = other.model_->buffers();
  mine = model_->buffers();
  for (std::size_t i = 0; i < mine.size(); ++i) {
    mine[i].copy_(theirs[i]);
  }
  for (std::size_t i = 0; i < model_->blocks.size(); ++i) {
    const auto from = other.model_->blocks[i]->unregistered();
    auto to = model_->blocks[i]->unregistered();
    for (std::size_t t = 0; t < to.size(); ++t) {
      to[t].copy_(from[t]);
    }
  }
  const auto clones = [](const std::vector<at::Tensor>& tensors) {
    std::vector<at::Tensor> result;
    for (const at::Tensor& tensor : tensors) {
      result.push_back(tensor.clone());
    }
    return result;
  };
  kept_ = clones(other.kept_);
  losses_ = clones(other.losses_);
  inputs_.clear();
  random = other.random.defined() ? other.random.clone() : at::Tensor();
  if (other.second_ != nullptr) {
    second().become(*other.second_);
  }
}

}  // namespace sidestream::habits
