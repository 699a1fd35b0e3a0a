// Gradients that one graph hands on to the next without a copy, where two of them are one tensor.
#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "models/layer_stack.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"

namespace sidestream::testing_model {
namespace {

Tensors two_results(const Tensors& in) { return {in[0].exp(), in[0].sin()}; }
/// Its backward gives one tensor as the gradient of both.
Tensors sum_of_two(const Tensors& in) { return {in[0] + in[1]}; }

TEST(LinkedGradientTest, OneTensorForTwoOutputsOfWhichOneIsReadElsewhereToo) {
  const c10::Device device = find_device("sim");
  torch::nn::Module model;
  OffloadEngine engine(model, Options(device).offload("**").min_bytes(1024));
  const auto graphed = make_graphed_callables(
      engine, {Callable("two", two_results), Callable("sum", sum_of_two)},
      {{rows(0, device).requires_grad_(true)}, {Sample::output_of(0, 0), Sample::output_of(0, 1)}});
  for (const std::int64_t read : {-1, 0, 1}) {
    const auto gradient = [&](const auto& first, const auto& second) {
      const at::Tensor x = rows(10 + read, device).requires_grad_(true);
      const Tensors both = first({x});
      at::Tensor loss = (second(both)[0] * rows(20, device)).sum();
      if (read >= 0) {
        loss = loss + (both[static_cast<std::size_t>(read)] * rows(30, device)).sum();
      }
      loss.backward();
      return x.grad().cpu();
    };
    EXPECT_TRUE(at::equal(gradient(graphed[0], graphed[1]), gradient(two_results, sum_of_two))) << read;
  }
}

TEST(LinkedGradientTest, AnOutputThatIsNotThere) {
  const c10::Device device = find_device("sim");
  torch::nn::Module model;
  OffloadEngine engine(model, Options(device));
  const auto capture = [&](std::int64_t output) {
    (void)make_graphed_callables(
        engine, {Callable("two", two_results), Callable("sum", sum_of_two)},
        {{rows(0, device).requires_grad_(true)}, {Sample::output_of(0), Sample::output_of(0, output)}});
  };
  EXPECT_THROWS(UsageError, "\"sum\" takes output 2 of callable \"two\", but that one returns only 2", capture(2));
  EXPECT_THROWS(UsageError, "count from 0", capture(-1));
}

}  // namespace
}  // namespace sidestream::testing_model
