#include "models/trapped_model.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>
#include <torch/utils.h>

#include "sidestream/call.h"
#include "sidestream/scope.h"

namespace sidestream::testing_model {
namespace {

constexpr std::int64_t kWidth = 16;

/// Twice its input; saves it, as a custom function would.
class Doubled : public torch::autograd::Function<Doubled> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, std::int64_t trap) {
    context->save_for_backward({x});
    context->saved_data["trap"] = trap;
    at::Tensor y = x * 2;
    reinterpret_cast<Trap*>(trap)->visit(Trap::Place::custom_forward);
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const at::Tensor x = context->get_saved_variables()[0];
    at::Tensor grad = grads[0] * 2 + x * 0;
    reinterpret_cast<Trap*>(context->saved_data["trap"].toInt())->visit(Trap::Place::custom_backward);
    return {grad, at::Tensor()};
  }
};

class NodeHook final : public torch::autograd::FunctionPreHook {
 public:
  explicit NodeHook(Trap& trap) : trap_(trap) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    trap_.visit(Trap::Place::node_hook);
    return grads;
  }

 private:
  Trap& trap_;
};

class AccumulatedHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit AccumulatedHook(Trap& trap) : trap_(trap) {}
  void operator()(const at::Tensor& /*parameter*/) override { trap_.visit(Trap::Place::post_accumulate_hook); }

 private:
  Trap& trap_;
};

at::Tensor weight(std::int64_t out, std::int64_t in) { return at::randn({out, in}) * 0.2; }

}  // namespace

const char* name_of(Trap::Place place) {
  switch (place) {
    case Trap::Place::call_begins:
      return "call_begins";
    case Trap::Place::in_scope:
      return "in_scope";
    case Trap::Place::in_nested_scope:
      return "in_nested_scope";
    case Trap::Place::custom_forward:
      return "custom_forward";
    case Trap::Place::custom_backward:
      return "custom_backward";
    case Trap::Place::tensor_hook:
      return "tensor_hook";
    case Trap::Place::node_hook:
      return "node_hook";
    case Trap::Place::call_ends:
      return "call_ends";
    case Trap::Place::between_calls:
      return "between_calls";
    case Trap::Place::between_calls_backward:
      return "between_calls_backward";
    case Trap::Place::parameter_hook:
      return "parameter_hook";
    case Trap::Place::post_accumulate_hook:
      return "post_accumulate_hook";
    case Trap::Place::pre_warmup_hook:
      return "pre_warmup_hook";
    case Trap::Place::post_warmup_hook:
      return "post_warmup_hook";
    case Trap::Place::progress:
      return "progress";
  }
  return "";
}

void Trap::arm(Place place, std::int64_t n, std::function<void()> act) {
  place_ = place;
  left_ = n;
  act_ = std::move(act);
  sprung_ = false;
}

void Trap::visit(Place place, const at::Tensor& saved) {
  if (place != place_ || left_ < 0 || left_-- > 0) {
    return;
  }
  sprung_ = true;
  struct Visit {
    Trap& trap;
    ~Visit() { trap.saved_ = at::Tensor(); }
  } const visit{*this};
  saved_ = saved;
  act_();
}

TrappedLayer::TrappedLayer(std::int64_t hidden, Trap& trap) : trap_(trap) {
  fc1_ = register_parameter("fc1", weight(2 * hidden, hidden));
  fc2_ = register_parameter("fc2", weight(hidden, 2 * hidden));
}

at::Tensor TrappedLayer::forward(at::Tensor h) {
  trap_.visit(Trap::Place::call_begins);
  at::Tensor x;
  {
    const OffloadScope outer("mlp");
    {
      const OffloadScope scope("fc1");
      x = at::linear(h, fc1_);
      trap_.visit(Trap::Place::in_nested_scope);
    }
    const at::Tensor saved = x;
    x = at::gelu(x);
    trap_.visit(Trap::Place::in_scope, saved);
  }
  x = Doubled::apply(x, reinterpret_cast<std::int64_t>(&trap_));
  if (x.requires_grad()) {
    x.register_hook([trap = &trap_](const at::Tensor& /*grad*/) { trap->visit(Trap::Place::tensor_hook); });
    x.grad_fn()->add_pre_hook(std::make_unique<NodeHook>(trap_));
  }
  {
    const OffloadScope scope("fc2");
    x = at::linear(x, fc2_).tanh();
  }
  trap_.visit(Trap::Place::call_ends);
  return h + x;
}

TrappedModel::TrappedModel(std::int64_t count, Trap& trap) : trap_(trap) {
  torch::manual_seed(17);
  first_ = register_parameter("first", weight(kWidth, kWidth));
  for (std::int64_t i = 0; i < count; ++i) {
    layers->push_back(std::make_shared<TrappedLayer>(kWidth, trap));
  }
  register_module("layers", layers);
}

at::Tensor TrappedModel::loss(const at::Tensor& x) {
  at::Tensor h;
  {
    const OffloadScope scope("first");
    h = at::linear(x, first_).sigmoid();
  }
  for (auto& layer : *layers) {
    h = call(layer->as<TrappedLayer>(), h);
    trap_.visit(Trap::Place::between_calls);
    if (h.requires_grad()) {
      h.register_hook(
          [trap = &trap_](const at::Tensor& /*grad*/) { trap->visit(Trap::Place::between_calls_backward); });
    }
  }
  return h.square().mean();
}

void TrappedModel::hook_parameters() {
  for (at::Tensor& parameter : parameters()) {
    parameter.register_hook([trap = &trap_](const at::Tensor& /*grad*/) { trap->visit(Trap::Place::parameter_hook); });
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, std::make_unique<AccumulatedHook>(trap_));
  }
}

at::Tensor trapped_input(std::int64_t s, c10::Device device) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(400 + s));
  return at::randn({24, kWidth}, generator, at::TensorOptions()).to(device);
}

}  // namespace sidestream::testing_model
