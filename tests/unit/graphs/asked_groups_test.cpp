// Groups by hand: a program says when its groups are offloaded and reloaded, and which of its own tensors give their memory up.
#include <deque>
#include <optional>
#include <thread>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/call.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/graphed_step.h"
#include "sidestream/owning.h"
#include "sidestream/scope.h"
#include "sidestream/tensor_pool.h"
#include "unit/graphs/asked_groups_fixture.h"

namespace sidestream::testing_model {
namespace {

using Handles = std::deque<OffloadScope>;

TEST_F(AskedGroups, TheirMemoryIsFreeWhenTheProgramSaysSo) {
  OffloadEngine engine(model_, options());
  two_steps(engine);
  const at::Tensor x = data(7);
  auto step = engine.step();
  Handles handles;
  at::Tensor h = layers(x.mul(2), handles);  // of d, c, b and a, the lag holds the last two
  const std::int64_t before = allocated();
  handles[1].finish_offload();
  EXPECT_EQ(allocated(), before) << "b has left: two groups have ended since";
  step.finish();
  EXPECT_EQ(engine.report().offloaded_bytes, 4 * kSquareBytes) << "the lag keeps c and d, which backward needs first";
  h.sum().backward();

  Handles again;
  auto next = engine.step();
  const at::Tensor g = layer(x.mul(2), "a", again).mul(0.9);
  const std::int64_t held = allocated();
  again[0].finish_offload();
  EXPECT_EQ(held - allocated(), 2 * kSquareBytes) << "exp's and tanh's outputs";
  again[0].start_reload();
  EXPECT_EQ(allocated(), held);
  g.sum().backward();
}

TEST_F(AskedGroups, AGroupThatEndsLaterLeavesWhenAskedAndNoneIsLost) {
  OffloadEngine engine(model_, options());
  two_steps(engine);
  const std::int64_t whole = engine.report().offloaded_bytes;
  EXPECT_EQ(whole, 4 * kSquareBytes);
  enum class Ask { one_by_one, all, nothing };
  for (const Ask ask : {Ask::one_by_one, Ask::all, Ask::nothing}) {
    const at::Tensor x = data(7);
    Handles handles;
    auto step = engine.step();
    at::Tensor h = layer(x.mul(2), "a", handles, true);
    h = layer(h, "b", handles, true);
    if (ask == Ask::one_by_one) {
      handles[1].start_offload();
      handles[0].start_offload();
    } else if (ask == Ask::all) {
      offload_delayed();
    }
    h = layer(h, "c", handles, true);
    h = layer(h, "d", handles, true);
    step.finish();
    EXPECT_EQ(engine.report().offloaded_bytes, whole);
    h.sum().backward();
    const at::Tensor plain = data(7);
    Handles none;
    layers(plain.mul(2), none).sum().backward();
    EXPECT_TRUE(at::equal(x.grad().cpu(), plain.grad().cpu()));
  }
}

// Upstream the last delayed group of a step is lost.
TEST_F(AskedGroups, WhatStillWaitsAtTheEndOfTheStepLeavesThen) {
  OffloadEngine engine(model_, options());
  two_steps(engine);
  const auto loss = [](const at::Tensor& x) {
    Handles handles;
    return layer(layer(x.mul(2), "a", handles, true), "b", handles, true).sum();  // as much as the lag holds
  };
  const at::Tensor x = data(7);
  auto step = engine.step();
  const at::Tensor mine = loss(x);
  step.finish();
  EXPECT_EQ(engine.report().offloaded_bytes, 4 * kSquareBytes);
  mine.backward();
  const at::Tensor plain = data(7);
  loss(plain).backward();
  EXPECT_TRUE(at::equal(x.grad().cpu(), plain.grad().cpu()));
}

TEST_F(AskedGroups, ABackwardThatComesBeforeTheCopyKeepsItsGroup) {
  OffloadEngine engine(model_, options());
  two_steps(engine);
  const at::Tensor x = data(7);
  Handles handles;
  auto step = engine.step();
  layer(x.mul(2), "a", handles, true).sum().backward();
  offload_delayed();
  handles[0].start_offload();
  handles[0].start_reload();
  step.finish();
  EXPECT_EQ(engine.report().offloaded_bytes, 0);
  EXPECT_EQ(engine.report().reloaded_bytes, 0);
}

// As a pipeline's hooks do; on the simulated device they run on a thread of autograd's.
TEST_F(AskedGroups, AHookOfTheBackwardReloads) {
  OffloadEngine engine(model_, options());
  std::int64_t reloaded = 0;
  const auto gradient = [&](std::int64_t s) {
    const at::Tensor x = data(s);
    Handles handles;
    reloaded = 0;
    at::Tensor h = layers(x.mul(2), handles);
    h.register_hook([&](const at::Tensor& /*gradient*/) {
      const std::int64_t before = allocated();
      for (OffloadScope& handle : handles) {
        handle.start_reload();
      }
      reloaded += allocated() - before;
    });
    h.sum().backward();
    return x.grad();
  };
  for (std::int64_t s = 0; s < 4; ++s) {
    at::Tensor mine;
    {
      const auto step = engine.step();
      mine = gradient(s);
    }
    EXPECT_EQ(reloaded, 4 * kSquareBytes) << "all of a and b at once, before the first of them is used";
    EXPECT_TRUE(at::equal(mine.cpu(), gradient(s).cpu())) << s;
    EXPECT_EQ(engine.report().reloaded_bytes, 4 * kSquareBytes) << "the lag keeps c and d";
    EXPECT_EQ(engine.report().inline_reloads, 0) << s;
  }
}

TEST_F(AskedGroups, OutsideOfAStepTheyDoNothing) {
  OffloadScope scope("alone");
  const at::Tensor h = data(1).exp();
  mark_ready(h);
  scope.end_later();
  scope.end_later();
  scope.start_offload();
  scope.finish_offload();
  scope.start_reload();
  scope.release(h);
  offload_delayed();
  EXPECT_EQ(h.cpu().numel(), 64 * 64);
}

TEST_F(AskedGroups, WrongUsesSayWhatToDo) {
  OffloadEngine engine(model_, options());
  two_steps(engine);
  std::optional<OffloadScope> late;
  const at::Tensor x = data(7);
  {
    const auto step = engine.step();
    OffloadScope scope("a");
    const at::Tensor h = x.exp();
    EXPECT_THROWS(UsageError, "has not ended, so its group is not complete", scope.start_offload());
    EXPECT_THROWS(UsageError, "call end() or end_later() first", scope.finish_offload());
    EXPECT_THROWS(UsageError, "OffloadScope::start_reload: the scope \"a\"", scope.start_reload());
    EXPECT_THROWS(UsageError, "OffloadScope::release: the scope \"a\" has not ended", scope.release(h));
    std::thread([&] { EXPECT_THROWS(UsageError, "was ended on another thread", scope.end_later()); }).join();
    scope.end();
    EXPECT_THROWS(UsageError, "end a scope once", scope.end_later());
    scope.end();
    EXPECT_THROWS(UsageError, "is in no group of this step: it stays on the device (parameter)", scope.release(x));
    EXPECT_THROWS(UsageError, "autograd did not save it inside of the step", scope.release(x.detach().mul(2)));
    OffloadScope other("b");
    const at::Tensor tanh = h.tanh();
    other.end();
    EXPECT_THROWS(UsageError, "is in the group \"a\", which saved it first", other.release(h));
    std::thread([&] { EXPECT_THROWS(UsageError, "began on another thread", scope.release(h)); }).join();
    tanh.sum().backward();
    late.emplace("late");
    late->end();
  }
  EXPECT_THROWS(UsageError, "the step of the scope \"late\" has ended", late->start_reload());
  EXPECT_THROWS(UsageError, "use the handle before that", late->release(x));
  two_steps(engine);
  EXPECT_EQ(engine.report().offloaded_bytes, 4 * kSquareBytes) << "the engine goes on";
}

TEST_F(AskedGroups, ATensorOfAPoolIsNotReleased) {
  OffloadEngine engine(model_, options());
  two_steps(engine);
  TensorPool pool(TensorPool::Memory::device, device_);
  for (std::int64_t s = 0; s < 2; ++s) {
    const at::Tensor factor = pool.allocate({64, 64}, at::kFloat);
    EXPECT_NE(factor.storage().data(), nullptr);
    factor.fill_(2);
    const at::Tensor x = data(s);
    {
      const auto step = engine.step();
      OffloadScope scope("a");
      const at::Tensor y = x * factor;
      scope.end();
      EXPECT_THROWS(UsageError, "lies in memory of a TensorPool", scope.release(factor));
      y.sum().backward();
    }
    EXPECT_TRUE(at::equal(x.grad(), factor));
    pool.free(factor);
  }
  EXPECT_EQ(pool.statistics().total, 1);
}

TEST_F(AskedGroups, AReadOfAReleasedTensorNamesItsGroup) {
  OffloadEngine engine(model_, options().graph("reads"));
  std::vector<std::vector<at::Tensor>> all_held;
  for (std::int64_t s = 0; s < 4; ++s) {
    std::vector<at::Tensor>& held = all_held.emplace_back();
    const auto loss = [&](const at::Tensor& x, bool release) {
      at::Tensor h = x.mul(2);
      for (const char* name : {"a", "b", "c", "d"}) {
        OffloadScope scope(name);
        held.push_back(h.exp());
        h = held.back().mul(0.5).tanh();
        scope.end();
        if (release) {
          scope.release(held.back());
          scope.release(held.back());
        }
      }
      return h.sum();
    };
    const at::Tensor x = data(s);
    {
      const auto step = engine.step();
      const at::Tensor value = loss(x, true);
      EXPECT_THROWS(c10::Error, "this tensor was released by the group \"a\"", (void)held[0].cpu());
      EXPECT_THROWS(c10::Error, "this tensor was released by the group \"c\"", (void)held[2].view({-1}).add(1));
      EXPECT_THROWS(c10::Error, "\"d\" (OffloadScope::release)", (void)held[3].mul_(2));
      EXPECT_THROWS(c10::Error, "this tensor was released by the group \"b\"",
                    (void)call(
                        "reads", [](const at::Tensor& t) { return t.exp(); }, held[1].detach()));
      value.backward();
    }
    const at::Tensor plain = data(s);
    loss(plain, false).backward();
    EXPECT_TRUE(at::equal(x.grad().cpu(), plain.grad().cpu())) << s;
    EXPECT_EQ(engine.report().offloaded_bytes, s == 0 ? 8 * kSquareBytes : 4 * kSquareBytes)
        << "that the program holds them does not matter";
  }
}

TEST_F(AskedGroups, ACaptureRefusesAReleasedTensor) {
  OffloadEngine engine(model_, options());
  two_steps(engine);
  const at::Tensor x = data(7);
  at::Tensor held;
  {
    const auto step = engine.step();
    OffloadScope scope("a");
    held = x.mul(2).exp();
    const at::Tensor h = held.mul(0.5).tanh();
    scope.end();
    scope.release(held);
    h.sum().backward();
  }
  const Callable reads("reads", owning([held](const Tensors& in) { return Tensors{in[0] * held}; }));
  EXPECT_THROWS(c10::Error, "this tensor was released by the group \"a\"",
                (void)make_graphed_callables(engine, {reads}, {{data(8)}}));
  const Callable own("own", owning([](const Tensors& in) { return Tensors{in[0].exp()}; }));
  const at::Tensor y = data(9);
  make_graphed_callables(engine, {own}, {{data(8)}}).at(0)({y}).at(0).sum().backward();
  EXPECT_TRUE(at::equal(y.grad().cpu(), y.detach().exp().cpu())) << "the engine goes on";
}

TEST_F(AskedGroups, AReleasedTensorsMemoryIsFreeBehindItsCopy) {
  OffloadEngine engine(model_, options());
  two_steps(engine);
  for (const bool release : {false, true}) {
    const at::Tensor x = data(7);
    const auto step = engine.step();
    OffloadScope scope("a");
    const at::Tensor held = x.mul(2).exp();
    const at::Tensor h = held.mul(0.5).tanh();
    scope.end();
    if (release) {
      scope.release(held);
    }
    const std::int64_t before = allocated();
    scope.finish_offload();
    EXPECT_EQ(before - allocated(), release ? kSquareBytes : 0) << "the program holds h";
    h.sum().backward();
  }
}

// Without the first version's own release, its backward would read an empty storage.
TEST_F(AskedGroups, ATensorThatWasSavedInTwoVersionsIsReleasedInBoth) {
  OffloadEngine engine(model_, options());
  two_steps(engine);
  const auto loss = [&](const at::Tensor& x, bool release) {
    OffloadScope scope("a");
    const at::Tensor h = x.mul(2);
    const at::Tensor first = h.square();
    const at::Tensor second = at::Tensor(h.variable_data()).mul(x);  // counts its versions anew
    scope.end();
    if (release) {
      scope.release(h);
      EXPECT_THROWS(c10::Error, "released by the group", (void)h.cpu());
    }
    return first.sum() + second.sum();
  };
  const at::Tensor x = data(7);
  {
    const auto step = engine.step();
    loss(x, true).backward();
  }
  const at::Tensor plain = data(7);
  loss(plain, false).backward();
  EXPECT_TRUE(at::equal(x.grad().cpu(), plain.grad().cpu()));
}

TEST_F(AskedGroups, InsideOfACapturedCallTheyAreRefused) {
  for (const int which : {0, 1, 2, 3}) {
    OffloadEngine engine(model_, options().graph("captured"));
    const auto body = owning([&](const at::Tensor& x) {
      OffloadScope scope("inside");
      const at::Tensor h = x.exp();
      if (which == 0) {
        scope.end_later();
      } else if (which == 1) {
        scope.end();
        scope.finish_offload();
      } else if (which == 2) {
        offload_delayed();
      } else {
        mark_ready(h);
      }
      return h;
    });
    const at::Tensor x = data(3);
    {
      const auto step = engine.step();
      EXPECT_THROWS(UsageError, "inside of a call that is captured", (void)call("captured", body, x));
      EXPECT_THROWS(UsageError, "Call it outside of graphed calls", (void)call("captured", body, x));
    }
    OffloadEngine next(model_, options());
    two_steps(next);
  }
}

TEST_F(AskedGroups, AHandleFromOutsideIsRefusedInACapturedCall) {
  OffloadEngine engine(model_, options().graph("captured"));
  Handles handles;
  bool ask = true;
  const auto body = owning([&](const at::Tensor& t) {
    if (ask) {
      handles[0].finish_offload();
    }
    return t.exp();
  });
  const auto run = [&](std::int64_t s) {
    const auto step = engine.step();
    handles.clear();
    const at::Tensor x = data(s);
    const at::Tensor h = layer(x.mul(2), "a", handles);
    call("captured", body, h).sum().backward();
  };
  EXPECT_THROWS(UsageError, "inside of a call that is captured", run(0));
  ask = false;
  run(1);
  run(2);
  EXPECT_GT(engine.report().replays, 0);
}

TEST_F(AskedGroups, AHandleIsRefusedInTheStepOfAnotherEngine) {
  OffloadEngine engine(model_, options());
  torch::nn::Module other_model;
  OffloadEngine other(other_model, options());
  for (std::int64_t s = 0; s < 3; ++s) {
    auto step = engine.step();
    Handles handles;
    const at::Tensor h = layer(data(s).mul(2), "a", handles);
    auto step_of_other = other.step();
    EXPECT_THROWS(UsageError, "while a step of another engine is active", handles[0].start_reload());
    step_of_other.finish();
    h.sum().backward();
    step.finish();
  }
}

/// A step function whose groups leave and come back as it says.
Tensors asked_loss(torch::nn::SequentialImpl& model, const Tensors& inputs) {
  at::Tensor h = inputs[0];
  Handles handles;
  for (torch::nn::AnyModule& layer : model) {
    OffloadScope& group = handles.emplace_back("asked");
    h = layer.forward(h);
    group.end_later();
    group.start_offload();
    group.finish_offload();
    h = h.mul(0.9).add(0.1);
  }
  for (auto group = handles.rbegin(); group != handles.rend(); ++group) {
    group->start_reload();
  }
  return {(h * inputs[1]).sum()};
}

Tensors releasing_loss(torch::nn::SequentialImpl& model, const Tensors& inputs) {
  OffloadScope group("asked");
  const at::Tensor h = model.forward(inputs[0]).exp();
  group.end();
  group.release(h);
  return {(h * inputs[1]).sum()};
}

TEST_F(AskedGroups, AWholeStepsGraphCopiesWhenAsked) {
  torch::nn::Sequential mine = layer_stack(4, device_);
  torch::nn::Sequential plain = layer_stack(4, device_);
  OffloadEngine engine(*mine, options());
  const auto data_of = [&](std::int64_t s) { return Tensors{rows(s, device_), rows(s, device_, 1)}; };
  GraphedStep step = make_graphed_step(engine, Callable("step", &asked_loss, mine), {data_of(100)}, {});
  for (std::int64_t s = 0; s < 3; ++s) {
    clear_gradients(*plain);
    asked_loss(*plain, data_of(s))[0].backward();
    (void)step({data_of(s)});
    EXPECT_TRUE(same(gradients(*mine), gradients(*plain))) << s;
  }
  EXPECT_GT(engine.report().offloaded_bytes, 0);
  EXPECT_THROWS(UsageError, "drop the tensor instead",
                (void)make_graphed_step(engine, Callable("releases", &releasing_loss, mine), {data_of(100)}, {}));
}

}  // namespace
}  // namespace sidestream::testing_model
