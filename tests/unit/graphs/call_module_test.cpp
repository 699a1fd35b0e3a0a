// Modules that a call is given as arguments: watched as the call's own.
#include <array>
#include <memory>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include "call_arguments_fixture.h"
#include "expect_throws.h"
#include "sidestream/call.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"

namespace sidestream::testing_model {
namespace {

TEST_F(CallArguments, AModuleArgumentIsWatched) {
  OffloadEngine engine(*model_, options());
  const Loss loss = [](Scaler& model, const at::Tensor& x, std::int64_t /*s*/) {
    return call(
               "f", [](Scaler& m, const at::Tensor& y) { return m.forward(y); }, model, x)
        .sum();
  };
  expect_plain(engine, 0, 3, loss);
  for (const auto& module : {model_, plain_}) {
    module->weight.set_data(module->weight.detach() * -2);
  }
  expect_plain(engine, 3, 6, loss);
  EXPECT_EQ(engine.report().recaptures, 1);
}

TEST_F(CallArguments, AnotherModuleIsAnotherCapture) {
  std::shared_ptr<Scaler> second_model;
  std::shared_ptr<Scaler> second_plain;
  expect_two_captures([&](Scaler& model, const at::Tensor& x, int which) {
    auto& second = &model == model_.get() ? second_model : second_plain;
    if (second == nullptr) {
      second = std::make_shared<Scaler>(-0.3);  // no part of the model that the engine knows
      second->to(device_);
    }
    const auto one = which == 0 ? std::static_pointer_cast<Scaler>(model.shared_from_this()) : second;
    return (call(
                "f", [](const std::shared_ptr<Scaler>& m, const at::Tensor& y) { return m->forward(y); }, one, x) +
            model.weight)
        .sum();
  });
  ASSERT_TRUE(second_model->weight.grad().defined());
  EXPECT_TRUE(at::equal(second_model->weight.grad().cpu(), second_plain->weight.grad().cpu()));
}

// Of no model that the engine knows.
TEST_F(CallArguments, AForeignModuleIsWatchedToo) {
  std::array<std::shared_ptr<Scaler>, 2> foreign{std::make_shared<Scaler>(-0.3), std::make_shared<Scaler>(-0.3)};
  for (const auto& module : foreign) {
    module->to(device_);
  }
  OffloadEngine engine(*model_, options());
  const Loss loss = [&](Scaler& model, const at::Tensor& x, std::int64_t /*s*/) {
    return call(
               "f", [](Scaler& m, Scaler& other, const at::Tensor& y) { return m.forward(other.forward(y)); }, model,
               *foreign[&model == model_.get() ? 0 : 1], x)
        .sum();
  };
  expect_plain(engine, 0, 3, loss);
  for (const auto& module : foreign) {
    module->weight.set_data(module->weight.detach() * -2);
  }
  expect_plain(engine, 3, 6, loss);
  EXPECT_EQ(engine.report().captures, 4);
  EXPECT_EQ(engine.report().replays, 2);
  EXPECT_TRUE(at::equal(foreign[0]->weight.grad().cpu(), foreign[1]->weight.grad().cpu()));
}

TEST_F(CallArguments, HoldersAndAnyModulesAreModules) {
  torch::manual_seed(3);
  std::array<torch::nn::Linear, 2> linears{torch::nn::Linear(32, 32), torch::nn::Linear(nullptr)};
  linears[1] = std::dynamic_pointer_cast<torch::nn::LinearImpl>(linears[0]->clone());
  std::array<torch::nn::AnyModule, 2> any;
  for (std::size_t i = 0; i < 2; ++i) {
    linears[i]->to(device_);
    any[i] = torch::nn::AnyModule(linears[i]);
  }
  expect_one_capture([&](Scaler& model, const at::Tensor& x, std::int64_t /*s*/) {
    const std::size_t i = &model == model_.get() ? 0 : 1;
    return call(
               "f",
               [](torch::nn::Linear linear, torch::nn::AnyModule again, const std::vector<torch::nn::Linear>& list,
                  const at::Tensor& y) { return linear(y) + again.forward(y) + list[0]->weight.sum(); },
               linears[i], any[i], std::vector<torch::nn::Linear>{linears[i]}, model.forward(x))
        .sum();
  });
  EXPECT_TRUE(at::equal(linears[0]->weight.grad().cpu(), linears[1]->weight.grad().cpu()));
}

TEST_F(CallArguments, AModuleThatNobodyOwnsIsRefused) {
  OffloadEngine engine(*model_, options());
  Scaler local(0.5);
  local.to(device_);
  EXPECT_THROWS(UsageError, "no shared_ptr owns it", {
    const auto step = engine.step();
    (void)call(
        "f", [](Scaler& m, const at::Tensor& y) { return m.forward(y); }, local, rows(0, device_));
  });
  // The engine's own model outlives it, whoever owns it.
  OffloadEngine of_local(local, options());
  for (std::int64_t s = 0; s < 3; ++s) {
    const auto step = of_local.step();
    call(
        "f", [](Scaler& m, const at::Tensor& y) { return m.forward(y); }, local, rows(s, device_))
        .sum()
        .backward();
  }
  EXPECT_EQ(of_local.report().replays, 2);
}

TEST_F(CallArguments, ACallableIsGivenItsModule) {
  torch::nn::Linear linear(32, 32);
  linear->to(device_);
  OffloadEngine engine(*linear, Options(device_));
  const at::Tensor x = rows(1, device_).requires_grad_(true);
  const auto graphed = make_graphed_callables(
      engine,
      {Callable(
           "first", [](torch::nn::LinearImpl& m, const Tensors& in) { return Tensors{m.forward(in[0])}; }, linear),
       Callable(
           "second", [](torch::nn::Module& m, const Tensors& in) { return Tensors{in[0].matmul(m.parameters()[0])}; },
           linear.ptr())},
      {{x}, {Sample(rows(2, device_).requires_grad_(true))}});
  graphed[1]({graphed[0]({x})[0]})[0].sum().backward();
  const at::Tensor mine = linear->weight.grad().clone();
  linear->zero_grad();
  linear(x).matmul(linear->weight).sum().backward();
  EXPECT_TRUE(at::equal(mine.cpu(), linear->weight.grad().cpu()));
  EXPECT_THROWS(UsageError, "its module is null",
                (void)Callable(
                    "null", [](Scaler& /*m*/, const Tensors& in) { return in; }, std::shared_ptr<Scaler>()));
  EXPECT_THROWS(UsageError, "its module is null", (void)Callable("null", torch::nn::AnyModule()));
  EXPECT_THROWS(UsageError, "was given an empty name",
                (void)Callable("", torch::nn::AnyModule(torch::nn::Linear(2, 2))));
  EXPECT_THROWS(UsageError, "its function is null",
                (void)Callable("null", static_cast<Tensors (*)(const Tensors&)>(nullptr)));
  EXPECT_THROWS(UsageError, "count from 0", (void)Sample::output_of(-1));
  EXPECT_THROWS(UsageError, "count from 0", (void)Sample::output_of(0, -1));
}

}  // namespace
}  // namespace sidestream::testing_model
