// Groups by hand: a program says when its groups are offloaded and reloaded, and which of its own tensors give their memory up.
#include <deque>
#include <limits>
#include <optional>
#include <thread>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/graphed_step.h"
#include "sidestream/owning.h"
#include "sidestream/scope.h"
#include "sidestream/tensor_pool.h"

namespace sidestream::testing_model {
namespace {

using Handles = std::deque<OffloadScope>;

class AskedGroups : public testing::Test {
 protected:
  /// One storage of [64, 64] floats.
  static constexpr std::int64_t kSquareBytes = 64 * 64 * 4;

  [[nodiscard]] Options options() const { return Options(device_).min_bytes(1024).offload("**"); }
  [[nodiscard]] at::Tensor data(std::int64_t s) const {
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(300 + s));
    return at::randn({64, 64}, generator).to(device_).requires_grad_(true);
  }
  /// One group more, of two storages.
  static at::Tensor layer(const at::Tensor& h, const char* name, Handles& handles, bool later = false) {
    OffloadScope& scope = handles.emplace_back(name);
    at::Tensor result = h.exp().mul(0.5).tanh();
    later ? scope.end_later() : scope.end();
    return result;
  }
  static at::Tensor layers(at::Tensor h, Handles& handles, bool later = false) {
    for (const char* name : {"a", "b", "c", "d"}) {
      h = layer(h, name, handles, later);
    }
    return h;
  }
  [[nodiscard]] std::int64_t allocated() const { return make_runtime(device_)->memory_stats().allocated; }
  /// A sizing step and one with the plan.
  template <class Loss>
  void two_steps(OffloadEngine& engine, const Loss& loss) {
    for (std::int64_t s = 0; s < 2; ++s) {
      const auto step = engine.step();
      loss(data(s)).backward();
    }
  }
  void two_steps(OffloadEngine& engine) {
    two_steps(engine, [](const at::Tensor& x) {
      Handles handles;
      return layers(x.mul(2), handles).sum();
    });
  }

  c10::Device device_ = find_device("sim");
  torch::nn::Module model_;
};

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

TEST_F(AskedGroups, BudgetsBoundWhatIsOffloaded) {
  struct Case {
    std::int64_t most;
    double fraction;
    std::int64_t offloaded;  ///< of a and b, which the lag does not keep: two storages each
  };
  for (const auto& [most, fraction, offloaded] : {Case{4, 1, 4}, Case{3, 1, 2}, Case{2, 1, 2}, Case{1, 1, 0},
                                                  Case{0, 1, 0}, Case{4, 0.5, 2}, Case{4, 0.49, 0}, Case{4, 0, 0}}) {
    OffloadEngine engine(model_, options().offload_at_most("a,b,c,d", static_cast<std::size_t>(most * kSquareBytes)));
    OffloadEngine by_fraction(model_, options().offload_fraction("**", fraction));
    OffloadEngine& asked = fraction < 1 ? by_fraction : engine;
    two_steps(asked);
    EXPECT_EQ(asked.report().offloaded_bytes, offloaded * kSquareBytes) << most << " storages, " << fraction;
    for (const GroupReport& group : asked.report().groups) {
      if (group.name == "b") {
        EXPECT_EQ(group.kept_because,
                  offloaded == 4 ? "" : "over the budget of Options::offload_at_most or offload_fraction");
      }
    }
  }
}

TEST_F(AskedGroups, ABudgetThatNamesNothingIsRefused) {
  OffloadEngine engine(model_, options().offload_at_most("unknown", kSquareBytes));
  const auto steps = [&] { two_steps(engine); };
  EXPECT_THROWS(UsageError, "unknown", steps());
}

TEST_F(AskedGroups, ASecondBudgetForTheSameGroupsIsRefused) {
  EXPECT_THROWS(UsageError, "\"a,b\" has two budgets",
                OffloadEngine(model_, options().offload_at_most("a,b", 1).offload_fraction("b, a", 0.5)));
}

TEST_F(AskedGroups, AFractionOutsideOfZeroToOneIsRefused) {
  for (const double fraction : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_THROWS(UsageError, "from 0 to 1", OffloadEngine(model_, options().offload_fraction("a", fraction)));
    EXPECT_THROWS(UsageError, "for \"a\"", OffloadEngine(model_, options().offload_fraction("a", fraction)));
  }
}

}  // namespace
}  // namespace sidestream::testing_model
