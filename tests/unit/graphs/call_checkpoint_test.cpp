// Calls in functions that run their forward again in backward.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "call_fixture.h"
#include "expect_throws.h"
#include "models/plain_twin.h"
#include "sidestream/call.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"

namespace sidestream::testing_model {
namespace {

/// LibTorch's own form of a checkpoint: the forward runs without gradients, and again in backward.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return run(x, weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const at::AutoGradMode grad_mode(true);
    const at::Tensor x = saved[0].detach().requires_grad_(true);
    const at::Tensor weight = saved[1].detach().requires_grad_(true);
    const auto made = torch::autograd::grad({run(x, weight)}, {x, weight}, {grads[0]});
    return {made[0], made[1]};
  }
  static at::Tensor run(const at::Tensor& x, const at::Tensor& weight) {
    return call(
        "inner", [](const at::Tensor& y, const at::Tensor& w) { return y.matmul(w).tanh(); }, x, weight);
  }
};

TEST_F(CallTest, ACallInACheckpointRunsEagerlyAndTheReportSaysSo) {
  OffloadEngine engine(model_, Options(device_).graph("inner,blocks.*"));
  const at::Tensor weight = (at::randn({32, 32}) * 0.1).to(device_).requires_grad_(true);
  for (std::int64_t s = 0; s < 4; ++s) {
    const at::Tensor x = at::randn({16, 32}).to(device_).requires_grad_(true);
    weight.mutable_grad() = at::Tensor();
    in_step(&engine, [&] {
      Recomputed::apply(x, weight).sum().backward();
      model_.loss_of(s).backward();
    });
    const at::Tensor mine = weight.grad().clone();
    const at::Tensor mine_x = x.grad().clone();
    x.mutable_grad() = at::Tensor();
    weight.mutable_grad() = at::Tensor();
    Recomputed::apply(x, weight).sum().backward();
    EXPECT_TRUE(at::equal(mine.cpu(), weight.grad().cpu()));
    EXPECT_TRUE(at::equal(mine_x.cpu(), x.grad().cpu()));
  }
  const std::vector<std::string> notes = engine.report().notes;
  EXPECT_TRUE(std::any_of(notes.begin(), notes.end(), [](const std::string& note) {
    return note.find("\"inner\" ran eagerly 4 times under no_grad") == 0 &&
           note.find("1 of them have no capture") != std::string::npos;
  })) << testing::PrintToString(notes);
}

/// What users write who know nothing of Sidestream: backward runs the forward again, and backward inside it.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return (x.matmul(weight)).tanh();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const at::AutoGradMode grad_mode(true);
    const at::Tensor x = saved[0].detach().requires_grad_(true);
    x.matmul(saved[1]).tanh().backward(grads[0]);
    return {x.grad(), at::Tensor()};
  }
};

TEST_F(CallTest, ACheckpointOfTheUsersIsRefusedByName) {
  OffloadEngine engine(model_, options());
  const at::Tensor weight = (at::randn({32, 32}) * 0.1).to(device_).requires_grad_(true);
  const at::Tensor x = at::randn({16, 32}).to(device_).requires_grad_(true);
  const std::string message = message_of<Error>([&] {
    (void)make_graphed_callables(engine, {Callable("checkpointed", owning([&](const Tensors& in) {
                                                     return Tensors{Checkpoint::apply(in[0], weight)};
                                                   }))},
                                 {{x}});
  });
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "checkpoint", message);
  EXPECT_FALSE(weight.grad().defined()) << "no capture has touched it";
  expect_plain(engine, 0, 3);
}

}  // namespace
}  // namespace sidestream::testing_model
