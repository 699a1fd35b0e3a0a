// Arguments of callables by name.
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"

namespace sidestream::testing_model {
namespace {

Tensors masked_of(const Tensors& in) {
  const at::Tensor h = in[0] * in[1];
  return {in[2].defined() ? h - in[2] : h};
}

class NamedInputTest : public testing::Test {
 protected:
  [[nodiscard]] GraphedCallable graph(Callable callable) {
    return make_graphed_callables(engine_, {std::move(callable)}, {{input(0), rows(1, device_), at::Tensor()}})[0];
  }
  [[nodiscard]] at::Tensor input(std::int64_t step) const { return rows(step, device_).requires_grad_(true); }

  c10::Device device_ = find_device("sim");
  torch::nn::Sequential model_ = layer_stack(1, device_);
  OffloadEngine engine_{*model_, Options(device_)};
  GraphedCallable named_ = graph(Callable("masked", masked_of).input_names({"x", "mask", "bias"}));
};

TEST_F(NamedInputTest, AnyOrderIsTheOrderOfTheCapture) {
  for (std::int64_t step = 1; step < 5; ++step) {
    const at::Tensor mask = rows(step, device_, 1);
    const at::Tensor x = input(step);
    const at::Tensor y = step % 2 == 0 ? named_.call({{"x", x}, {"mask", mask}, {"bias", at::Tensor()}})[0]
                                       : named_.call({{"bias", {}}, {"mask", mask}, {"x", x}})[0];
    y.square().sum().backward();
    const at::Tensor x_plain = input(step);
    const at::Tensor y_plain = masked_of({x_plain, mask, {}})[0];
    y_plain.square().sum().backward();
    EXPECT_TRUE(same({{"output", y}, {"gradient", x.grad()}}, {{"output", y_plain}, {"gradient", x_plain.grad()}}));
  }
}

TEST_F(NamedInputTest, ByPositionAsWell) {
  const at::Tensor x = input(3);
  EXPECT_TRUE(at::equal(named_({x, rows(4, device_), {}})[0].cpu(), (x * rows(4, device_)).cpu()));
}

TEST_F(NamedInputTest, WithoutGradAndInAListOfTheCallers) {
  const at::NoGradGuard no_grad;
  const std::vector<NamedInput> inputs{{"mask", rows(4, device_)}, {"bias", rows(5, device_)}, {"x", rows(3, device_)}};
  EXPECT_TRUE(at::equal(named_.call(inputs)[0].cpu(), (rows(3, device_) * rows(4, device_) - rows(5, device_)).cpu()))
      << "an eager run takes them as well";
}

TEST_F(NamedInputTest, UnknownMissingAndRepeatedNamesAreRefused) {
  const at::Tensor x = input(1);
  const at::Tensor mask = rows(1, device_);
  EXPECT_THROWS(UsageError, "graphed call \"masked\": has no input \"masks\"; its inputs are \"x\", \"mask\", \"bias\"",
                (void)named_.call({{"x", x}, {"masks", mask}, {"bias", {}}}));
  EXPECT_THROWS(UsageError, "has no input \"extra\"",
                (void)named_.call({{"x", x}, {"mask", mask}, {"bias", {}}, {"extra", mask}}));
  EXPECT_THROWS(UsageError, "input \"bias\" is missing", (void)named_.call({{"x", x}, {"mask", mask}}));
  EXPECT_THROWS(UsageError, "input \"x\" is missing", (void)named_.call({}));
  EXPECT_THROWS(UsageError, "input \"x\" is given twice",
                (void)named_.call({{"x", x}, {"x", x}, {"mask", mask}, {"bias", {}}}));
  EXPECT_THROWS(UsageError, "input 1 has shape",
                (void)named_.call({{"x", x}, {"mask", mask.slice(0, 0, 3)}, {"bias", {}}}));
  const GraphedCallable unnamed = graph(Callable("plain", masked_of));
  EXPECT_THROWS(UsageError, "Callable::input_names", (void)unnamed.call({{"x", x}, {"mask", mask}, {"bias", {}}}));
  const at::Tensor y = named_.call({{"x", x}, {"mask", mask}, {"bias", {}}})[0];
  EXPECT_TRUE(at::equal(y.cpu(), (x * mask).cpu())) << "a refused call leaves it as it was";
}

TEST_F(NamedInputTest, NamesThatMakeNoSense) {
  EXPECT_THROWS(UsageError, "the name of its input 1 is empty",
                (void)Callable("masked", masked_of).input_names({"x", ""}));
  EXPECT_THROWS(UsageError, "two of its inputs are named \"x\"",
                (void)Callable("masked", masked_of).input_names({"x", "mask", "x"}));
  EXPECT_THROWS(UsageError, "names 2 inputs (\"x\", \"mask\"), but has 3 samples",
                (void)graph(Callable("masked", masked_of).input_names({"x", "mask"})));
}

}  // namespace
}  // namespace sidestream::testing_model
