#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "operator_cases.h"

namespace {

using sidestream::test::gradients;
using sidestream::test::OperatorCase;
using sidestream::test::parameter;
using sidestream::test::values;
using Tensors = std::vector<at::Tensor>;

struct Doubled : torch::autograd::Function<Doubled> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return {x * 2};
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    return {grads[0] * 2 + 0 * context->get_saved_variables()[0]};
  }
};

std::vector<OperatorCase> arithmetic_cases() {
  using D = c10::Device;
  return {
      {"Matmul",
       [](D d) {
         auto x = parameter({4, 4}, d), w = parameter({4, 4}, d);
         return gradients(at::silu(at::matmul(x, w)), {x, w});
       }},
      {"LinearWithBias",
       [](D d) {
         auto x = parameter({2, 4, 8}, d), w = parameter({16, 8}, d), b = parameter({16}, d);
         return gradients(at::linear(x, w, b), {x, w, b});
       }},
      {"LinearWithoutBias",
       [](D d) {
         auto x = parameter({2, 4, 8}, d), w = parameter({16, 8}, d);
         return gradients(at::linear(x, w), {x, w});
       }},
      {"EinsumAndBatched",
       [](D d) {
         auto x = parameter({2, 4, 4}, d), y = parameter({2, 4, 4}, d);
         return gradients(at::einsum("bij,bjk->bik", {x, y}) + at::baddbmm(x, x, y), {x, y});
       }},
      {"Activations",
       [](D d) {
         auto x = parameter({8, 8}, d);
         return gradients(at::gelu(x) + at::gelu(x, "tanh") + at::silu(x) + at::sigmoid(x) * at::tanh(x), {x});
       }},
      {"GatedLinearUnit",
       [](D d) {
         auto x = parameter({8, 8}, d);
         return gradients(at::glu(x), {x});
       }},
      {"Rotary",
       [](D d) {
         auto x = parameter({2, 2, 8, 4}, d);
         const auto on = at::TensorOptions().device(d);
         auto angle = at::arange(8, on).to(at::kFloat).unsqueeze(1) * at::ones({1, 2}, on);
         auto parts = x.chunk(2, -1);
         auto c = angle.cos(), s = angle.sin();
         return gradients(at::cat({parts[0] * c - parts[1] * s, parts[1] * c + parts[0] * s}, -1), {x});
       }},
      {"CatStackWhere",
       [](D d) {
         auto x = parameter({4}, d);
         return gradients(at::cat({x, x * 2, at::stack({x, x}).flatten(), at::where(x > 0, x, x * 2)}), {x});
       }},
      {"Repeats",
       [](D d) {
         auto x = parameter({4, 4}, d);
         auto counts = at::arange(4).to(d);
         return gradients(at::cat({at::repeat_interleave(x, counts, 0), x.repeat({2, 1})}), {x});
       }},
      {"InPlace",
       [](D d) {
         auto x = values({4, 8}, d);
         x.add_(1).mul_(2).sub_(values({8}, d)).div_(3).clamp_(-1, 1).exp_();
         x.zero_().fill_(2).masked_fill_(x > 1, 0.5);
         return Tensors{x};
       }},
      {"OutputIsInput",
       [](D d) {
         auto x = values({4, 4}, d), y = values({4, 4}, d);
         at::add_out(x, x, y);
         at::mul_out(y, x, y);
         return Tensors{x, y};
       }},
      {"OutputGrows",
       [](D d) {
         auto x = values({8, 8}, d);
         auto product = at::empty({0}, x.options()), sum = at::empty({0}, x.options()),
              small = at::empty({2}, x.options());
         at::matmul_out(product, x, x);
         at::add_out(sum, x, x);
         small.resize_({0});
         at::cat_out(small, {x, x});
         return Tensors{product, sum, small};
       }},
      {"Reductions",
       [](D d) {
         auto x = parameter({4, 8}, d);
         return gradients(
             at::cat({x.mean(1), x.amax(1), x.var(1), at::logsumexp(x, {1}), at::cumsum(x, 1).select(1, 7)}), {x});
       }},
      {"NothingToReduce",
       [](D d) {
         auto x = parameter({0, 4}, d);
         return gradients(at::matmul(x, parameter({4, 4}, d)), {x});
       }},
      {"HostScalars",
       [](D d) {
         auto x = values({4}, d);
         return Tensors{x * at::scalar_tensor(2.0), x + at::ones({}), x.to(at::kBFloat16) * 2.5};
       }},
      {"ForeachLists",
       [](D d) {
         Tensors w{values({8, 8}, d), values({3}, d)}, g{values({8, 8}, d), values({3}, d)};
         at::_foreach_add_(w, g, 0.5);
         const Tensors norms = at::_foreach_norm(w);
         at::_foreach_mul_(w, 2.0);
         at::_foreach_zero_(g);
         return Tensors{w[0], w[1], norms[0], norms[1], g[0], g[1]};
       }},
      {"FusedAdamW",
       [](D d) {
         auto w = values({8, 8}, d), g = values({8, 8}, d), m = at::zeros_like(w), v = at::zeros_like(w);
         auto step = at::ones({}, w.options());
         at::_fused_adamw_({w}, {g}, {m}, {v}, {}, {step}, 1e-2, 0.9, 0.999, 0.1, 1e-8, false, false);
         return Tensors{w, m, v};
       }},
      {"DoubleBackward",
       [](D d) {
         auto x = parameter({8, 8}, d), w = parameter({8, 8}, d);
         auto y = at::silu(at::matmul(x, w)).square().sum();
         auto first = torch::autograd::grad({y}, {x}, {}, true, true);
         return torch::autograd::grad({first[0].square().sum()}, {w});
       }},
      {"BackwardOfASign",
       [](D d) {
         auto x = parameter({8, 8}, d);
         return gradients(at::sgn(x) + x, {x});
       }},
      {"PenaltyOnAbsoluteValues",
       [](D d) {
         auto x = parameter({8, 8}, d), w = parameter({8, 8}, d);
         auto y = at::matmul(x, w).abs().sum();
         auto first = torch::autograd::grad({y}, {x}, {}, true, true);
         return torch::autograd::grad({first[0].square().sum()}, {x, w});
       }},
      {"BackwardTwice",
       [](D d) {
         auto x = parameter({8, 8}, d);
         auto y = at::silu(x).square().sum();
         auto first = torch::autograd::grad({y}, {x}, {}, true);
         return Tensors{first[0], torch::autograd::grad({y}, {x})[0]};
       }},
      {"CustomFunction",
       [](D d) {
         auto x = parameter({4}, d);
         return gradients(Doubled::apply(x)[0], {x});
       }},
      {"Accumulated",
       [](D d) {
         auto x = parameter({4, 4}, d), w = parameter({4, 4}, d);
         for (int i = 0; i < 2; ++i) {
           at::matmul(x, w).sum().backward();
         }
         return Tensors{x.grad(), w.grad()};
       }},
      {"FourierTransform", [](D d) { return Tensors{at::real(at::fft_rfft(values({8}, d))).clone()}; }},
      {"ValuesOnTheHost",
       [](D d) {
         auto x = values({4}, d);
         return Tensors{at::scalar_tensor(x.sum().item<double>()), at::scalar_tensor(at::equal(x, x)),
                        at::scalar_tensor(at::allclose(x, x + 1)), at::isfinite(x).all()};
       }},
  };
}

SIDESTREAM_OPERATOR_SUITE(OperatorArithmetic, arithmetic_cases());

}  // namespace
