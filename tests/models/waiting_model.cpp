#include "models/waiting_model.h"

#include <thread>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/index.h>
#include <ATen/ops/masked_select.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>

#include "sidestream/call.h"
#include "sidestream/scope.h"

namespace sidestream::testing_model {
namespace {

struct Planted {
  WaitContext context{};
  std::function<void(const at::Tensor&)> wait;
};
/// Read by autograd's threads as well, while a step runs.
Planted planted;

bool is_planted(WaitContext context) { return planted.wait && planted.context == context; }

void wait_at(WaitContext context, const at::Tensor& tensor) {
  if (is_planted(context)) {
    const c10::AutoGradMode no_grad(false);
    planted.wait(tensor.detach());
  }
}

struct WaitsInBackward : torch::autograd::Function<WaitsInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list grads) {
    wait_at(WaitContext::backward, grads[0]);
    return grads;
  }
};

}  // namespace

std::vector<ExpectedPlace> waiting_places() {
  return {
      {WaitContext::eager_call, "eager call", "front", "front", false},
      {WaitContext::between, "between", "", "", false},
      {WaitContext::scope, "scope", "", "middle", false},
      {WaitContext::hook, "hook", "", "", true},
      {WaitContext::backward, "backward", "", "", true},
      {WaitContext::optimizer, "optimizer", "", "", false},
  };
}

std::vector<WaitKind> operator_waits() {
  const at::Tensor pinned = at::empty({8, 8}).pin_memory();  // pinning waits itself
  return {
      {"item", "value read on the host", "aten::item", [](const at::Tensor& t) { (void)t.sum().item<float>(); }},
      {"is_nonzero", "value read on the host", "aten::is_nonzero",
       [](const at::Tensor& t) { (void)t.sum().is_nonzero(); }},
      {"equal", "value read on the host", "aten::equal", [](const at::Tensor& t) { (void)at::equal(t, t.add(1)); }},
      {"nonzero", "result whose shape depends on data", "aten::nonzero",
       [](const at::Tensor& t) { (void)at::nonzero(t); }},
      {"masked_select", "result whose shape depends on data", "aten::masked_select",
       [](const at::Tensor& t) { (void)at::masked_select(t, t.gt(0)); }},
      {"index by a mask", "result whose shape depends on data", "aten::index",
       [](const at::Tensor& t) { (void)at::index(t, {t.gt(0)}); }},
      {"blocking copy to the host", "blocking copy", "aten::copy_", [pinned](const at::Tensor& t) { pinned.copy_(t); }},
      {"blocking copy to the device", "blocking copy", "aten::copy_",
       [pinned](const at::Tensor& t) {
         (void)at::zeros({8, 8}, t.options()).copy_(pinned);
       }},
      {"to the CPU", "copy of pageable host memory", "aten::to", [](const at::Tensor& t) { (void)t.to(at::kCPU); }},
      {"pageable copy that is not to block", "copy of pageable host memory", "aten::to",
       [](const at::Tensor& t) {
         (void)at::empty({8, 8}).to(t.device(), /*non_blocking=*/true);
       },
       /*past_libtorch=*/true},
      {"index on the host", "copy of pageable host memory", "aten::index",
       [](const at::Tensor& t) { (void)at::index(t, {at::zeros({2}, at::kLong)}); }},
  };
}

PlantedWait::PlantedWait(WaitContext context, std::function<void(const at::Tensor&)> wait) {
  planted = {context, std::move(wait)};
}

PlantedWait::~PlantedWait() { planted = {}; }

class WaitingModel::Layer : public torch::nn::Module {
 public:
  Layer() : weight_(register_parameter("weight", at::rand({8, 8}))) {}
  at::Tensor forward(at::Tensor h) {
    h = at::tanh(h.matmul(weight_));
    wait_at(WaitContext::eager_call, h);
    return h;
  }

 private:
  at::Tensor weight_;
};

WaitingModel::WaitingModel()
    : front_(register_module("front", std::make_shared<Layer>())),
      back_(register_module("back", std::make_shared<Layer>())) {}

void WaitingModel::train_on(at::Tensor h, bool eager_too) {
  h = call(front_, h);
  if (eager_too) {
    const at::NoGradGuard no_grad;
    (void)call(front_, h.detach());
  }
  wait_at(WaitContext::between, h);
  {
    const OffloadScope scope("middle");
    h = h.add(1);
    h = h.mul(h);
    wait_at(WaitContext::scope, h);
  }
  h = WaitsInBackward::apply(h);  // its node, with the hook's, is made outside of the scope
  if (is_planted(WaitContext::hook)) {
    h.register_hook([](const at::Tensor& grad) { wait_at(WaitContext::hook, grad); });
  }
  h = call(back_, h);
  h.sum().backward();
  if (is_planted(WaitContext::other_thread)) {
    std::thread([&] { wait_at(WaitContext::other_thread, h); }).join();
  }
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : parameters()) {
    parameter.sub_(parameter.grad(), 0.01);
    parameter.mutable_grad().zero_();
  }
  wait_at(WaitContext::optimizer, h);
}

WaitingTail::WaitingTail() : weight_(register_parameter("weight", at::rand({8, 8}))) {}

at::Tensor WaitingTail::forward(at::Tensor h) {
  h = at::tanh(h.matmul(weight_));
  const OffloadScope scope("tail");
  return WaitsInBackward::apply(h);
}

}  // namespace sidestream::testing_model
