#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <sidestream/error.h>
#include <torch/library.h>

#include <functional>
#include <string>

#include "expect_throws.h"
#include "operator_cases.h"
#include "sim/rerun/recording.h"
#include "sim/torch/schema_audit.h"

namespace {

using sidestream::test::values;

void expect_usage_error(const std::function<void()>& call, const std::string& part) {
  try {
    call();
    FAIL() << "no error that says " << part;
  } catch (const sidestream::UsageError& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(OperatorErrors, TensorsOfTwoDevicesAreRefusedByName) {
  const at::Tensor x = values({4, 4}, sidestream::test::sim()), host = at::ones({4, 4});
  expect_usage_error([&] { (void)at::mm(x, host); }, "aten::mm");
  expect_usage_error([&] { (void)at::add(x, host); }, "sim and on cpu");
}

TEST(OperatorErrors, GeneratorOfAnotherDeviceIsRefused) {
  const at::Tensor x = at::empty({4}, at::TensorOptions().device(sidestream::test::sim()));
  expect_usage_error([&] { x.normal_(0, 1, at::detail::getDefaultCPUGenerator()); }, "generator");
}

TEST(OperatorErrors, PinnedTensorsAreMadeOnTheHost) {
  const auto on = at::TensorOptions().device(sidestream::test::sim());
  expect_usage_error([&] { (void)at::empty({4}, on.pinned_memory(true)); }, "pinned");
}

TEST(OperatorErrors, OperatorWithoutCpuKernelIsNamed) {
  const at::Tensor x = values({4, 4}, sidestream::test::sim());
  expect_usage_error([&] { (void)at::_masked_scale(x, x, 2.0); }, "aten::_masked_scale");
}

TEST(OperatorErrors, AFailedKernelLeavesTheDeviceUsable) {
  const at::Tensor x = values({4, 4}, sidestream::test::sim());
  EXPECT_THROW((void)at::mm(x, values({3, 4}, x.device())), c10::Error);
  EXPECT_THROW((void)at::index_select(x, 0, at::full({1}, 9, at::kLong).to(x.device())), c10::Error);
  EXPECT_EQ((x - x).abs().sum().item<double>(), 0);
}

const at::Tensor& constant() {
  static const at::Tensor tensor = at::arange(3, at::kFloat);
  return tensor;
}

TEST(OperatorErrors, ResultInHostMemoryIsCopiedButCannotBeKept) {
  torch::Library definition(torch::Library::DEF, "sidestream_test", std::nullopt, __FILE__, __LINE__);
  definition.def("constant_for(Tensor x) -> Tensor");
  torch::Library kernel(torch::Library::IMPL, "sidestream_test", c10::DispatchKey::CPU, __FILE__, __LINE__);
  kernel.impl(
      "constant_for", +[](const at::Tensor& /*x*/) { return constant(); });
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow("sidestream_test::constant_for", "")
                      .typed<at::Tensor(const at::Tensor&)>();
  const at::Tensor x = values({3}, sidestream::test::sim());
  (void)constant();
  const at::Tensor result = op.call(x);
  EXPECT_TRUE(result.is_privateuseone());
  EXPECT_TRUE(sidestream::test::same_bits(constant(), result));
  sidestream::sim::Recording recording;
  EXPECT_THROW((void)op.call(x), sidestream::Error);
  recording.stop();
}

TEST(OperatorErrors, AResultWithoutMemoryIsRefused) {
  torch::Library definition(torch::Library::DEF, "sidestream_test", std::nullopt, __FILE__, __LINE__);
  definition.def("zeros_without_memory(Tensor x) -> Tensor");
  torch::Library kernel(torch::Library::IMPL, "sidestream_test", c10::DispatchKey::CPU, __FILE__, __LINE__);
  kernel.impl(
      "zeros_without_memory", +[](const at::Tensor& x) { return at::_efficientzerotensor(x.sizes(), x.options()); });
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow("sidestream_test::zeros_without_memory", "")
                      .typed<at::Tensor(const at::Tensor&)>();
  EXPECT_THROWS(sidestream::Error, "zeros_without_memory returned a tensor without memory",
                (void)op.call(values({3}, sidestream::test::sim())));
}

TEST(SchemaAudit, FindsNothingInOperatorsWhoseWritesAreKnown) {
  const c10::Device device = sidestream::test::sim();
  const at::Tensor x = values({2, 3, 8}, device), mean = at::zeros({3}).to(device), var = at::ones({3}).to(device);
  sidestream::sim::set_schema_audit(true);
  (void)at::batch_norm(x, {}, {}, mean, var, true, 0.1, 1e-5, false);
  at::Tensor y = at::linear(x, values({8, 8}, device));
  y.add_(1).mul_(y);
  at::mul_out(y, y, y);
  sidestream::sim::set_schema_audit(false);
  EXPECT_EQ(sidestream::sim::schema_audit_findings(), std::vector<std::string>{});
}

at::Tensor write_in_silence(const at::Tensor& x) {
  x.add_(1);
  return x.clone();
}

TEST(SchemaAudit, ReportsAnOperatorThatWritesWhatItsSchemaDoesNotMark) {
  torch::Library definition(torch::Library::DEF, "sidestream_test", std::nullopt, __FILE__, __LINE__);
  definition.def("write_in_silence(Tensor x) -> Tensor");
  torch::Library kernel(torch::Library::IMPL, "sidestream_test", c10::DispatchKey::CPU, __FILE__, __LINE__);
  kernel.impl("write_in_silence", &write_in_silence);
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow("sidestream_test::write_in_silence", "")
                      .typed<at::Tensor(const at::Tensor&)>();
  const at::Tensor x = at::zeros({3}).to(sidestream::test::sim());
  sidestream::sim::set_schema_audit(true);
  EXPECT_EQ(op.call(x).sum().item<double>(), 3);
  (void)op.call(x);
  sidestream::sim::set_schema_audit(false);
  EXPECT_EQ(
      sidestream::sim::schema_audit_findings(),
      std::vector<std::string>{"sidestream_test::write_in_silence writes argument 0, which its schema does not mark"});
}

}  // namespace
