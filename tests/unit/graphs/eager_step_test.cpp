#include <algorithm>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/linear.h>

#include "expect_throws.h"
#include "graphs/outputs/storage_holders.h"
#include "models/scopes.h"
#include "runtime/runtime.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/scope.h"
#include "unit/graphs/eager_step_fixture.h"

namespace sidestream::testing_model {
namespace {

TEST_F(EagerStep, GroupsLeaveAndComeBack) {
  OffloadEngine engine(model_, options().offload("first,second,third"));
  expect_plain(engine, three_scopes);
  const Report report = engine.report();
  EXPECT_EQ(report.offloaded_bytes, 4 * kSquareBytes) << "exp's and tanh's outputs of two groups; the last group stays";
  EXPECT_EQ(find(report, "third")->kept_because, "backward needs it immediately");
  EXPECT_EQ(find(report, "first")->offloaded_bytes, 2 * kSquareBytes);
  EXPECT_EQ(report.pinned_allocations_after_planning, 0);
}

TEST_F(EagerStep, NoMoreGroupsTrailThanTheOptionSays) {
  const std::vector<const char*> names = {"a", "b", "c", "d", "e", "f", "g"};
  const auto runtime = make_runtime(device_);
  for (std::int64_t most = 0; most < 4; ++most) {
    OffloadEngine engine(model_, options().lag(1_GiB).groups_in_flight(most).offload("**"));
    std::vector<std::int64_t> on_device;  // squares, after each group
    for (std::int64_t s = 0; s < 3; ++s) {
      const at::Tensor x = data(s).requires_grad_(true);
      on_device.clear();
      await_end_of_backward(device_);  // else what the last one's end holds may count
      const auto step = engine.step();
      const std::int64_t before = runtime->memory_stats().allocated;
      at::Tensor h = x.mul(1);
      for (const char* name : names) {
        h = through_scopes(h, {name});
        on_device.push_back((runtime->memory_stats().allocated - before) / kSquareBytes);
      }
      h.sum().backward();
    }
    // A group has two squares. The program holds one of the latest group, its output.
    std::vector<std::int64_t> expected;
    for (std::int64_t ended = 1; ended <= static_cast<std::int64_t>(names.size()); ++ended) {
      expected.push_back(std::max<std::int64_t>(1, 2 * std::min(ended, most)));
    }
    on_device.pop_back();  // after the last group reloads begin
    expected.pop_back();
    EXPECT_EQ(on_device, expected) << most;
    EXPECT_EQ(engine.report().offloaded_bytes,
              2 * kSquareBytes * (static_cast<std::int64_t>(names.size()) - std::max<std::int64_t>(1, most)));
  }
}

TEST_F(EagerStep, RelocatedWeightsStillStay) {
  OffloadEngine engine(model_, options().offload("all"));
  const Loss loss = [](const at::Tensor& x, const at::Tensor& weight) {
    at::Tensor h = x;
    for (const char* name : {"first", "second", "third"}) {
      const OffloadScope scope(name);
      h = h.matmul(weight.t()).tanh();
    }
    return h.sum();
  };
  expect_plain(engine, loss);
  const std::int64_t before = engine.report().offloaded_bytes;
  weight_.set_data(weight_.detach().clone());
  expect_plain(engine, loss);
  EXPECT_GT(before, 0);
  EXPECT_EQ(engine.report().offloaded_bytes, before);
}

TEST_F(EagerStep, ARetainedGraphRunsBackwardTwice) {
  OffloadEngine engine(model_, options().offload("all"));
  expect_plain(engine, three_scopes, /*backwards=*/2);
  EXPECT_GT(engine.report().offloaded_bytes, 0);
}

TEST_F(EagerStep, ScopesNestAndMayBeEmpty) {
  OffloadEngine engine(model_, options().offload("outer.inner, outer.inner.empty, outer"));
  expect_plain(engine, [](const at::Tensor& x, const at::Tensor& weight) {
    at::Tensor h = x * weight;
    {
      const OffloadScope outer("outer");
      h = h.exp();
      {
        const OffloadScope inner("inner");
        h = h.mul(0.1).tanh();
        const OffloadScope empty("empty");
      }
      h = h.sigmoid();
    }
    return h.mul(2).exp().sum();
  });
  const Report report = engine.report();
  ASSERT_NE(find(report, "outer.inner"), nullptr);
  EXPECT_EQ(find(report, "outer.inner")->offloaded_bytes, kSquareBytes) << "the innermost scope owns";
  EXPECT_EQ(find(report, "outer")->bytes, 2 * kSquareBytes) << "before and after the inner scope";
}

TEST_F(EagerStep, ScopeNamesAreOneWord) {
  OffloadEngine engine(model_, options());
  { const OffloadScope no_step("no.step.no.matter"); }
  const auto step = engine.step();
  EXPECT_THROWS(UsageError, "use one word", const OffloadScope scope("a.b"));
  EXPECT_THROWS(UsageError, "use one word", const OffloadScope scope(""));
  EXPECT_THROWS(UsageError, "use one word", (void)tag(data(0), "a.b"));
}

TEST_F(EagerStep, ATaggedTensorMovesAlone) {
  OffloadEngine engine(model_, options().offload("block.gate"));
  expect_plain(engine, [](const at::Tensor& x, const at::Tensor& weight) {
    at::Tensor h = x * weight;
    {
      const OffloadScope scope("block");
      const at::Tensor gate = tag(h.mul(2), "gate");
      h = gate.square().mul(0.1).tanh() * gate;
    }
    return h.mul(0.1).exp().sum();
  });
  const Report report = engine.report();
  ASSERT_NE(find(report, "block.gate"), nullptr);
  EXPECT_EQ(find(report, "block.gate")->bytes, kSquareBytes);
}

TEST_F(EagerStep, MarkedTensorsStay) {
  OffloadEngine engine(model_, options().offload("all"));
  const at::Tensor outside = data(50).requires_grad_(true);
  engine.mark_not_offload(outside);
  enum class Mark : std::uint8_t { none, by_name, by_engine };
  const auto loss = [&](Mark mark) {
    return [&, mark](const at::Tensor& x, const at::Tensor& weight) {
      at::Tensor h = x * weight;
      {
        const OffloadScope scope("first");
        h = h.exp();  // which saved it
        if (mark == Mark::by_name) {
          mark_not_offload(h);
        } else if (mark == Mark::by_engine) {
          engine.mark_not_offload(h);
        }
        h = h.tanh() * outside;
      }
      const OffloadScope scope("last");
      return h.mul(0.1).exp().sum();
    };
  };
  expect_plain(engine, loss(Mark::by_name));
  const Report report = engine.report();
  const std::int64_t marked = report.offloaded_bytes;
  const GroupReport* const first = find(report, "first");
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->bytes - first->offloaded_bytes, kSquareBytes);
  EXPECT_EQ(first->kept_because, "marked with mark_not_offload");
  engine.reset();
  expect_plain(engine, loss(Mark::by_engine));
  EXPECT_EQ(engine.report().offloaded_bytes, marked);
  engine.reset();
  expect_plain(engine, loss(Mark::none));
  EXPECT_EQ(engine.report().offloaded_bytes - marked, kSquareBytes) << "one tensor more";
}

TEST_F(EagerStep, AMarkHoldsIfTheCopyHasNotBegun) {
  const auto offloaded = [&](bool marks) {
    OffloadEngine engine(model_, options().offload("all"));
    expect_plain(engine, [marks](const at::Tensor& x, const at::Tensor& weight) {
      at::Tensor h = x * weight;
      {
        OffloadScope scope("first");
        h = h.exp();
        scope.end_later();
      }
      if (marks) {
        mark_not_offload(h);
      }
      offload_delayed();
      const OffloadScope scope("last");
      return h.mul(0.1).exp().sum();
    });
    EXPECT_EQ(engine.report().copied_twice_bytes, 0);
    return engine.report().offloaded_bytes;
  };
  const std::int64_t all = offloaded(false);
  ASSERT_GE(all, kSquareBytes);
  EXPECT_EQ(offloaded(true), all - kSquareBytes);
}

TEST_F(EagerStep, TheHostCapKeepsGroupsOnTheDevice) {
  for (const std::int64_t storages : {0, 1, 2, 3, 4}) {
    OffloadEngine engine(model_, options().offload("all").host_cap(static_cast<std::size_t>(storages * kSquareBytes)));
    expect_plain(engine, three_scopes);
    const Report report = engine.report();
    EXPECT_EQ(report.offloaded_bytes, storages / 2 * 2 * kSquareBytes) << "groups are taken whole";
    EXPECT_LE(report.pinned_bytes, report.host_cap);
    EXPECT_EQ(find(report, "second")->kept_because, storages < 4 ? "over the host cap" : "");
    EXPECT_EQ(report.notes.empty(), storages == 4);
  }
}

TEST_F(EagerStep, AStorageOfTwoGroupsStaysWithTheOneThatStays) {
  const Loss shared = [](const at::Tensor& x, const at::Tensor& weight) {
    at::Tensor h;
    {
      const OffloadScope scope("maker");
      h = (x * weight).exp();
    }
    {
      const OffloadScope scope("reader");
      h = h.matmul(weight) * h;
    }
    const OffloadScope scope("last");
    return h.mul(0.01).exp().sum();
  };
  OffloadEngine alone(model_, options().offload("maker,last"));
  expect_plain(alone, shared);
  const Report report = alone.report();
  EXPECT_EQ(find(report, "maker")->kept_because, "another group, which is not offloaded, saved the same storage");
  ASSERT_FALSE(report.notes.empty());
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "maker stays: reader", report.notes.front());
  OffloadEngine both(model_, options().offload("maker,reader,last"));
  expect_plain(both, shared);
  EXPECT_GE(find(both.report(), "maker")->offloaded_bytes, kSquareBytes);
}

/// Keeps its input where no hook sees it.
struct Hoarder : torch::autograd::Function<Hoarder> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->saved_data["kept"] = x.exp();
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 const torch::autograd::variable_list& grads) {
    return {grads[0] * 2};
  }
};

TEST_F(EagerStep, BytesThatNoHookSawAreReported) {
  OffloadEngine engine(model_, options().offload("all"));
  expect_plain(engine, three_scopes);
  const std::int64_t without = engine.report().unseen_bytes;
  engine.reset();
  expect_plain(engine,
               [](const at::Tensor& x, const at::Tensor& weight) { return three_scopes(Hoarder::apply(x), weight); });
  EXPECT_EQ(engine.report().unseen_bytes - without, kSquareBytes);
}

TEST_F(EagerStep, AForwardThatThrowsLeavesTheEngineUsable) {
  OffloadEngine engine(model_, options().offload("all"));
  expect_plain(engine, three_scopes);
  for (int i = 0; i < 3; ++i) {
    EXPECT_THROWS(std::runtime_error, "the model broke", {
      const auto step = engine.step();
      const at::Tensor x = data(60 + i).requires_grad_(true);
      const OffloadScope outer("first");
      const at::Tensor h = (x * weight_).exp();
      const OffloadScope inner("nested");
      if (h.tanh().defined()) {
        throw std::runtime_error("the model broke");
      }
    });
    { const OffloadScope outside("does.nothing.outside.of.steps"); }
    expect_plain(engine, three_scopes);
  }
}

TEST_F(EagerStep, AnEngineForgetsItsPlanOnReset) {
  OffloadEngine engine(model_, options().offload("**"));
  expect_plain(engine, three_scopes);
  engine.reset();
  const auto other = [](const at::Tensor& x, const at::Tensor& weight) {
    at::Tensor h = x * weight;
    for (const char* name : {"other", "last"}) {
      const OffloadScope scope(name);
      h = h.exp().mul(0.1).sigmoid();
    }
    return h.sum();
  };
  expect_plain(engine, other);
  const Report report = engine.report();
  EXPECT_EQ(find(report, "first"), nullptr);
  EXPECT_EQ(find(report, "other")->offloaded_bytes, 2 * kSquareBytes);
}

TEST_F(EagerStep, ResetLearnsTheWeightsOfModulesThatWereReplaced) {
  torch::nn::Module model;
  torch::nn::Linear part{nullptr};
  const auto make_part = [&] {
    torch::nn::Linear linear(torch::nn::LinearOptions(64, 64).bias(false));
    linear->to(device_);
    return linear;
  };
  const Loss product = [&](const at::Tensor& x, const at::Tensor& weight) {
    at::Tensor h = x * weight;
    {
      const OffloadScope scope("product");
      h = at::matmul(h, part->weight.t());
    }
    return through_scopes(h, {"second", "third"}).sum();
  };
  part = model.register_module("part", make_part());
  OffloadEngine engine(model, options().offload("all"));
  const auto weights_that_stay = [&] {
    const auto step = engine.step();
    (void)gradients(product, 0);
    const Report report = engine.report();
    const auto found = std::find_if(report.exclusions.begin(), report.exclusions.end(),
                                    [](const auto& exclusion) { return exclusion.reason == "parameter"; });
    return found == report.exclusions.end() ? 0 : found->tensors;
  };
  (void)weights_that_stay();
  const std::int64_t before = weights_that_stay();
  EXPECT_GT(before, 0);
  part = model.replace_module("part", make_part());
  engine.reset();
  (void)weights_that_stay();
  EXPECT_EQ(weights_that_stay(), before);
}

TEST_F(EagerStep, AStepThatTakesAnotherWayThanPlannedStaysRight) {
  OffloadEngine engine(model_, options().offload("**"));
  expect_plain(engine, three_scopes);
  expect_plain(engine, [](const at::Tensor& x, const at::Tensor& weight) {
    at::Tensor h = x * weight;
    for (const char* name : {"third", "first", "new", "first"}) {
      const OffloadScope scope(name);
      h = h.sigmoid().matmul(weight).exp();
    }
    return h.sum();
  });
}

TEST_F(EagerStep, APatternThatMatchesNothingListsTheNames) {
  OffloadEngine engine(model_, options().offload("first,thrid"));
  {
    const auto step = engine.step();
    (void)gradients(three_scopes, 0);
  }
  EXPECT_THROWS(UsageError, "thrid", (void)engine.step());
  EXPECT_THROWS(UsageError, "second", (void)engine.step());
}

}  // namespace
}  // namespace sidestream::testing_model
