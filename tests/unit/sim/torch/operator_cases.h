#pragma once
#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include <functional>
#include <ostream>
#include <vector>

namespace sidestream::test {

/// A computation whose results, values and gradients, must be the same bits on the CPU and on the sim device.
struct OperatorCase {
  const char* name;
  std::function<std::vector<at::Tensor>(c10::Device)> run;
};

inline std::ostream& operator<<(std::ostream& stream, const OperatorCase& operator_case) {
  return stream << operator_case.name;
}

/// Runs the case on both devices from the same seed and compares every result bit for bit.
void expect_same_on_sim(const OperatorCase& operator_case);

/// Normal values drawn on the CPU, then moved to `device`.
[[nodiscard]] at::Tensor values(std::vector<std::int64_t> size, c10::Device device, at::ScalarType dtype = at::kFloat);
/// The same as a leaf that needs a gradient.
[[nodiscard]] at::Tensor parameter(std::vector<std::int64_t> size, c10::Device device,
                                   at::ScalarType dtype = at::kFloat);
/// 0, 1, ..., count - 1, each modulo `modulus`.
[[nodiscard]] at::Tensor indices(std::int64_t count, std::int64_t modulus, c10::Device device);
/// The gradients of the sum of squares of `output`, followed by `output`.
[[nodiscard]] std::vector<at::Tensor> gradients(const at::Tensor& output, const std::vector<at::Tensor>& inputs);

/// Two tensors as bits: dtype, sizes and bytes. NaNs of the same bits are equal.
[[nodiscard]] ::testing::AssertionResult same_bits(const at::Tensor& expected, const at::Tensor& actual);

/// The sim device, registered.
[[nodiscard]] c10::Device sim();

inline std::string case_name(const ::testing::TestParamInfo<OperatorCase>& info) { return info.param.name; }

}  // namespace sidestream::test

/// A suite of cases in this file: `SIDESTREAM_OPERATOR_SUITE(Views, cases())`.
#define SIDESTREAM_OPERATOR_SUITE(suite, cases)                                        \
  class suite : public ::testing::TestWithParam<::sidestream::test::OperatorCase> {};  \
  TEST_P(suite, SameBitsOnSim) { ::sidestream::test::expect_same_on_sim(GetParam()); } \
  INSTANTIATE_TEST_SUITE_P(Cpu, suite, ::testing::ValuesIn(cases), ::sidestream::test::case_name)
