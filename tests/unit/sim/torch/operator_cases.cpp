#include "operator_cases.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstring>

#include "sim/torch/device_guard.h"
#include "sim/torch/registration.h"

namespace sidestream::test {

c10::Device sim() {
  sidestream::sim::register_sim_device();
  return sidestream::sim::sim_device();
}

at::Tensor values(std::vector<std::int64_t> size, c10::Device device, at::ScalarType dtype) {
  return at::randn(size, at::TensorOptions().dtype(dtype)).to(device);
}

at::Tensor parameter(std::vector<std::int64_t> size, c10::Device device, at::ScalarType dtype) {
  return values(std::move(size), device, dtype).detach().requires_grad_();
}

at::Tensor indices(std::int64_t count, std::int64_t modulus, c10::Device device) {
  return at::arange(count).remainder(modulus).to(device);
}

std::vector<at::Tensor> gradients(const at::Tensor& output, const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> results = torch::autograd::grad({output.square().sum()}, inputs);
  results.push_back(output.detach());
  return results;
}

::testing::AssertionResult same_bits(const at::Tensor& expected, const at::Tensor& actual) {
  if (expected.defined() != actual.defined()) {
    return ::testing::AssertionFailure() << "one of the tensors is undefined";
  }
  if (!expected.defined()) {
    return ::testing::AssertionSuccess();
  }
  const at::Tensor a = expected.detach().cpu().resolve_conj().resolve_neg().contiguous();
  const at::Tensor b = actual.detach().cpu().resolve_conj().resolve_neg().contiguous();
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes()) {
    return ::testing::AssertionFailure() << "expected " << a.scalar_type() << a.sizes() << ", got " << b.scalar_type()
                                         << b.sizes();
  }
  if (a.nbytes() > 0 && std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) != 0) {
    const double difference = a.is_complex() ? at::abs(a - b).max().item<double>()
                                             : (a.to(at::kDouble) - b.to(at::kDouble)).abs().max().item<double>();
    return ::testing::AssertionFailure() << "bits differ, at most by " << difference;
  }
  return ::testing::AssertionSuccess();
}

void expect_same_on_sim(const OperatorCase& operator_case) {
  const c10::Device device = sim();
  at::manual_seed(7);
  const std::vector<at::Tensor> expected = operator_case.run(at::kCPU);
  at::manual_seed(7);
  const std::vector<at::Tensor> actual = operator_case.run(device);
  ASSERT_EQ(expected.size(), actual.size());
  ASSERT_FALSE(expected.empty());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(same_bits(expected[i], actual[i])) << "result " << i;
  }
}

}  // namespace sidestream::test
