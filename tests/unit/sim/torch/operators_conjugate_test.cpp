// Tensors with a conjugate or negative bit: their memory holds other values than they stand for.
#include <ATen/ATen.h>
#include <sidestream/error.h>
#include <torch/csrc/autograd/autograd.h>

#include "operator_cases.h"
#include "runtime/runtime.h"

namespace {

using sidestream::test::OperatorCase;
using sidestream::test::same_bits;
using sidestream::test::values;
using Tensors = std::vector<at::Tensor>;

at::Tensor complex_values(std::vector<std::int64_t> size, c10::Device device) {
  size.push_back(2);
  return at::view_as_complex(values(std::move(size), device));
}

at::Tensor complex_parameter(std::vector<std::int64_t> size, c10::Device device) {
  return complex_values(std::move(size), device).detach().requires_grad_();
}

/// A real tensor with the negative bit.
at::Tensor negative_values(std::vector<std::int64_t> size, c10::Device device) {
  const at::Tensor view = at::imag(complex_values(std::move(size), device).conj());
  TORCH_CHECK(view.is_neg());
  return view;
}

/// The gradients of the sum of squared magnitudes, then the output.
Tensors complex_gradients(const at::Tensor& output, const Tensors& inputs) {
  Tensors results = torch::autograd::grad({output.abs().square().sum()}, inputs);
  results.push_back(output.detach());
  return results;
}

std::vector<OperatorCase> lazy_bit_cases() {
  using D = c10::Device;
  return {
      {"ToTheCpu",
       [](D d) {
         const at::Tensor z = complex_values({4, 3}, d), n = negative_values({4, 3}, d);
         return Tensors{z.conj().cpu(), z.conj().t().cpu(), n.cpu(), z.conj().narrow(1, 1, 2).cpu(), n.t().cpu()};
       }},
      {"FromTheCpu",
       [](D d) {
         const at::Tensor z = complex_values({4, 3}, at::kCPU), n = negative_values({4, 3}, at::kCPU);
         at::Tensor there = at::zeros({4, 3}, at::TensorOptions().device(d).dtype(at::kComplexFloat));
         there.conj().copy_(z);
         return Tensors{z.conj().to(d), n.to(d), there, there.clone().copy_(z.conj()),
                        z.conj().pin_memory().to(d, true)};
       }},
      {"BetweenTensorsOfTheDevice",
       [](D d) {
         const at::Tensor z = complex_values({4, 3}, d), n = negative_values({4, 3}, d);
         const at::Tensor from_conj = at::empty_like(z), to_conj = at::empty_like(z), both = at::empty_like(z);
         from_conj.copy_(z.conj());
         to_conj.conj().copy_(z);
         both.conj().copy_(z.conj());
         const at::Tensor to_neg = at::zeros({4, 3}, z.options());
         at::imag(to_neg.conj()).copy_(n);
         at::imag(to_neg.conj()).narrow(0, 0, 1).copy_(n.abs().narrow(0, 0, 1));
         return Tensors{from_conj, to_conj, both, to_neg};
       }},
      {"BetweenDtypes",
       [](D d) {
         const at::Tensor z = complex_values({4, 3}, d), n = negative_values({4, 3}, d);
         const at::Tensor to = at::empty({4, 3}, z.options().dtype(at::kComplexDouble));
         to.conj().copy_(z);
         return Tensors{z.conj().to(at::kComplexDouble), n.to(at::kDouble), n.to(at::kBFloat16), to};
       }},
      {"CopyFromAndResize",
       [](D d) {
         const at::Tensor z = complex_values({4, 3}, d), to = at::empty({4, 3}, z.options());
         if (d.is_cpu()) {  // has no such operator
           to.conj().copy_(z);
         } else {
           at::_copy_from_and_resize(z, to.conj());
         }
         return Tensors{to};
       }},
      {"Resolved",
       [](D d) {
         const at::Tensor z = complex_values({4, 3}, d), n = negative_values({4, 3}, d);
         return Tensors{z.conj().resolve_conj(),  n.resolve_neg(), at::view_as_real(z.conj().resolve_conj()),
                        z.conj().clone(),         n.clone(),       z.conj().contiguous(),
                        z.conj().conj_physical(), z.conj().conj(), z.conj().t().clone()};
       }},
      {"Parts",
       [](D d) {
         const at::Tensor z = complex_values({4, 3}, d);
         return Tensors{at::real(z.conj()).clone(), at::imag(z.conj()).clone(), at::imag(z.conj()) * 2,
                        at::view_as_real(z.conj().resolve_conj()) + 1};
       }},
      {"Arithmetic",
       [](D d) {
         const at::Tensor z = complex_values({4, 3}, d), n = negative_values({4, 3}, d);
         return Tensors{z.conj() + 1,
                        z.conj() * z,
                        z.conj().abs(),
                        z.conj() + n,
                        n.exp(),
                        n.sum(),
                        z.conj().sum(1),
                        z.conj().mul(z.conj()).angle(),
                        at::cat({z, z.conj()}),
                        at::stack({n, n * n}),
                        at::where(n > 0, z, z.conj())};
       }},
      {"InPlace",
       [](D d) {
         const at::Tensor z = complex_values({4, 3}, d), w = complex_values({4, 3}, d), n = negative_values({4, 3}, d);
         z.conj().mul_(w);
         z.conj().narrow(0, 1, 2).add_(w.conj().narrow(0, 1, 2));
         w.conj().zero_().add_(z.conj());
         n.add_(1).mul_(n);
         const at::Tensor out = at::empty_like(z);
         at::Tensor conjugate = out.conj();
         at::mul_out(conjugate, z, w);
         const at::Tensor physical = z.clone();
         physical.conj_physical_();
         physical.conj().narrow(0, 0, 2).conj_physical_();
         return Tensors{z, w, n, out, physical};
       }},
      {"OneValue",
       [](D d) {
         const at::Tensor z = complex_values({2}, d), n = negative_values({2}, d);
         const c10::complex<float> value = z.conj()[1].item<c10::complex<float>>();
         return Tensors{at::full({1}, value.imag()), at::full({1}, n[0].item<float>())};
       }},
      {"Matmul",
       [](D d) {
         const at::Tensor a = complex_values({4, 4}, d), b = complex_values({2, 4, 4}, d), v = complex_values({4}, d);
         const at::Tensor n = negative_values({4, 4}, d);
         return Tensors{a.matmul(a.conj().t()),
                        a.mH().matmul(a),
                        b.matmul(b.mH()),
                        b.conj().matmul(b),
                        at::addmm(a.conj(), a.conj(), a.mH()),
                        at::baddbmm(b.conj(), b, b.conj()),
                        at::dot(v, v.conj()),
                        at::vdot(v.conj(), v),
                        a.conj().mv(v),
                        n.matmul(n.t())};
       }},
      {"Autograd",
       [](D d) {
         const at::Tensor a = complex_parameter({4, 3}, d), b = complex_parameter({3, 4}, d);
         Tensors results = complex_gradients(a * a.conj(), {a});
         for (const Tensors& more : {complex_gradients(a.matmul(b).conj().matmul(b.mH()), {a, b}),
                                     complex_gradients(at::imag(a.conj()).exp() * a, {a}),
                                     complex_gradients(at::real(a.matmul(b)), {a, b})}) {
           results.insert(results.end(), more.begin(), more.end());
         }
         return results;
       }},
      {"Transformed",
       [](D d) {
         const at::Tensor x = values({8}, d).detach().requires_grad_();
         return Tensors{torch::autograd::grad({at::fft_rfft(x).abs().sum()}, {x})[0],
                        at::fft_ifft(at::fft_fft(x.detach()).conj())};
       }},
      {"Viewed",
       [](D d) {
         const at::Tensor z = complex_values({4, 4}, d), n = negative_values({4, 4}, d);
         return Tensors{z.conj().unfold(0, 2, 1).clone(), z.conj().view({2, 8}).clone(),
                        z.conj().t().reshape({8, 2}).clone(), n.unfold(1, 2, 2).clone(),
                        z.conj().as_strided({2, 2}, {4, 1}, 3).clone()};
       }},
  };
}

SIDESTREAM_OPERATOR_SUITE(OperatorLazyBits, lazy_bit_cases());

TEST(OperatorLazyBitErrors, AViewOfTheMemoryOfAConjugateIsRefusedAsOnTheCpu) {
  EXPECT_ANY_THROW((void)at::view_as_real(complex_values({4}, at::kCPU).conj()));
  EXPECT_ANY_THROW((void)at::view_as_real(complex_values({4}, sidestream::test::sim()).conj()));
}

// The journal of a capture holds what a copy reads and writes: a launch writes both again.
TEST(OperatorLazyBitCapture, CopiesReplayTheBitsOfTheCpu) {
  const c10::Device device = sidestream::test::sim();
  const auto runtime = sidestream::make_runtime(device);
  const sidestream::OwnedStream stream = runtime->create_stream();
  const sidestream::MemoryPool pool = runtime->create_pool();
  const auto run = [](const at::Tensor& z, const at::Tensor& to, const at::Tensor& host) {
    to.conj().copy_(z);
    at::imag(to.conj()).mul_(2);
    const at::Tensor sum = z.conj() + to;
    host.conj().copy_(sum.conj(), /*non_blocking=*/true);
    return Tensors{sum, z.mH().matmul(to.conj()), at::imag(z.conj()).clone()};
  };
  const auto make_host = [] { return at::zeros({4, 4}, at::kComplexFloat).pin_memory(); };
  const at::Tensor z = complex_values({4, 4}, device), to = at::zeros_like(z), host = make_host();
  const at::Tensor cpu_to = at::zeros({4, 4}, at::kComplexFloat), cpu_host = make_host();
  Tensors results;
  const sidestream::Graph graph = [&] {
    const sidestream::StreamGuard guard(*runtime, stream.get());
    runtime->begin_capture(stream.get(), pool);
    results = run(z, to, host);
    return runtime->end_capture(stream.get());
  }();
  EXPECT_TRUE(same_bits(cpu_to, to)) << "the capture puts back what it writes";
  for (int i = 0; i < 3; ++i) {
    const at::Tensor next = complex_values({4, 4}, at::kCPU);
    z.copy_(next);
    runtime->launch(graph, stream.get());
    runtime->synchronize(stream.get());
    const Tensors expected = run(next, cpu_to, cpu_host);
    EXPECT_TRUE(same_bits(cpu_to, to)) << i;
    EXPECT_TRUE(same_bits(cpu_host, host)) << i;
    for (std::size_t k = 0; k < expected.size(); ++k) {
      EXPECT_TRUE(same_bits(expected[k], results[k])) << "launch " << i << ", result " << k;
    }
  }
}

}  // namespace
