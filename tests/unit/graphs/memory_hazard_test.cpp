// The hazards of memory that graphs, their copies and the trainer share, one test for each. docs/graphs.md has the table.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "graphs/engine/engine_access.h"
#include "sidestream/error.h"
#include "sidestream/scope.h"
#include "unit/graphs/hazard_program.h"

namespace sidestream::testing_model {
namespace {

using MemoryHazardTest = HazardTest;

TEST_F(MemoryHazardTest, H04TheMainStreamWritesWhatACopyMayStillRead) {
  // In place on an output that nothing saved, and each batch into the memory of the one before.
  expect_right_in_every_order({"writes", [](const at::Tensor& weight) { return several(weight, 4); },
                               [buffer = at::Tensor()](const Calls& calls, std::int64_t s, c10::Device device) mutable {
                                 buffer = s == 0 ? rows(0, device) : buffer;
                                 std::vector<at::Tensor> results;
                                 for (std::int64_t m = 0; m < 2; ++m) {
                                   buffer.copy_(rows(10 * s + m, device));
                                   const at::Tensor x = buffer.detach().requires_grad_(true);
                                   at::Tensor y = run_all(calls, x);
                                   y.mul_(3).add_(1);
                                   (y * rows(s, device, 1)).sum().backward();
                                   results.push_back(x.grad().clone());
                                 }
                                 return results;
                               }});
  // One that the next call saved, and maybe still copies: refused by name, as plain training refuses it.
  torch::nn::Module nothing;
  OffloadEngine engine(nothing, Options(device_).offload("**").min_bytes(256));
  const auto graphed = make_graphed_callables(
      engine, {Callable("first", owning(exponentiates(weight_))), Callable("second", owning(exponentiates(weight_)))},
      {{rows(0, device_).requires_grad_(true)}, {Sample::output_of(0)}});
  {
    at::Tensor h = graphed[0]({rows(1, device_).requires_grad_(true)})[0];
    const at::Tensor loss = graphed[1]({h})[0].sum();
    h.mul_(2);
    EXPECT_THROWS(UsageError, "changed in place", loss.backward());
  }
  expect_usable(exponentiates(weight_));
}

TEST_F(MemoryHazardTest, H06MemoryThatACopyReadsIsNotUsedAgainWithinTheGraph) {
  // What leaves is let go of by the body at once; as much is allocated behind it, several times.
  const auto reuses = [](const at::Tensor& weight) -> TensorFunction {
    return [weight](const Tensors& in) {
      at::Tensor h = in[0];
      for (const char* name : {"first", "second", "third"}) {
        const OffloadScope scope(name);
        h = (name[0] == 'f' ? h * weight : h * 1.5)
                .tanh();                              // one gradient of the weight a call: sums are in plain order
        h = h + h.detach().exp().sigmoid().mul(0.1);  // as large as what leaves, gone at once
      }
      return Tensors{h};
    };
  };
  expect_right_in_every_order({"reuse", [&](const at::Tensor& weight) { return Calls(4, reuses(weight)); },
                               [](const Calls& calls, std::int64_t s, c10::Device device) {
                                 const at::Tensor x = rows(s, device).requires_grad_(true);
                                 (run_all(calls, x) * rows(s, device, 1)).sum().backward();
                                 return std::vector<at::Tensor>{x.grad()};
                               }});
}

TEST_F(MemoryHazardTest, H07GraphsOfOnePoolKeepTheirOrderAndPoolsAreApart) {
  expect_right_in_every_order({"pools", [](const at::Tensor& weight) { return several(weight, 8); },
                               [](const Calls& calls, std::int64_t s, c10::Device device) {
                                 const at::Tensor x = rows(s, device).requires_grad_(true);
                                 const at::Tensor z = rows(s, device, 2).requires_grad_(true);
                                 const Calls first(calls.begin(), calls.begin() + 4);
                                 const Calls second(calls.begin() + 4, calls.end());
                                 const at::Tensor a = run_all(s % 2 == 0 ? first : second, x);
                                 const at::Tensor b = run_all(s % 2 == 0 ? second : first, z);
                                 a.sum().backward();
                                 b.square().sum().backward();
                                 return std::vector<at::Tensor>{x.grad(), z.grad()};
                               },
                               /*on_stream=*/false, /*sequences=*/2});
  torch::nn::Module nothing;
  OffloadEngine engine(nothing, Options(device_).offload("**").min_bytes(256));
  std::vector<Callable> callables;
  for (int i = 0; i < 2; ++i) {
    callables.emplace_back("call." + std::to_string(i), owning(exponentiates(weight_)));
  }
  const Sample own = rows(0, device_).requires_grad_(true);
  const auto graphed = make_graphed_callables(engine, callables, {{own}, {own}});
  {
    const at::Tensor later = graphed[1]({rows(1, device_).requires_grad_(true)})[0];
    EXPECT_THROWS(UsageError, "called after \"call.1\", whose backward is pending",
                  (void)graphed[0]({rows(2, device_).requires_grad_(true)}));
    later.sum().backward();
  }
  expect_usable(exponentiates(weight_));
}

TEST_F(MemoryHazardTest, H08HostMemoryLivesAsLongAsTheGraphs) {
  const auto gradient = [&](const TensorFunction& function, const std::function<void()>& between) {
    const at::Tensor x = rows(3, device_).requires_grad_(true);
    const at::Tensor loss = function({x})[0].square().sum();
    between();
    loss.backward();
    return x.grad();
  };
  const at::Tensor expected =
      gradient([&](const Tensors& in) { return Tensors{run_all(several(weight_, 4), in[0])}; }, [] {});
  torch::nn::Module nothing;
  auto engine = std::make_unique<OffloadEngine>(nothing, Options(device_).offload("**").min_bytes(256));
  std::vector<Callable> callables;
  std::vector<std::vector<Sample>> samples;
  for (int i = 0; i < 4; ++i) {
    callables.emplace_back("call." + std::to_string(i), owning(exponentiates(weight_)));
    samples.push_back({i == 0 ? Sample(rows(0, device_).requires_grad_(true)) : Sample::output_of(i - 1)});
  }
  auto graphed = make_graphed_callables(*engine, callables, samples);
  const std::size_t leases = EngineAccess::state(*engine).arena().stats().live_leases;
  EXPECT_GT(leases, 0U);
  const TensorFunction chain = [&](const Tensors& in) {
    return Tensors{run_all(Calls(graphed.begin(), graphed.end()), in[0])};
  };
  EXPECT_TRUE(at::equal(gradient(chain, [] {}), expected));
  EXPECT_EQ(EngineAccess::state(*engine).arena().stats().live_leases, leases) << "nobody else's between steps";
  const auto drop_all = [&] {
    engine.reset();
    graphed.clear();
  };
  EXPECT_TRUE(at::equal(gradient(chain, drop_all), expected)) << "a backward that is pending keeps them";
}

TEST_F(MemoryHazardTest, H10GradientsThatAreHeldSurviveTheNextReplay) {
  // Of the weight and of the input, taken away and kept while later steps replay.
  expect_right_in_every_order(
      {"held gradients", [](const at::Tensor& weight) { return several(weight, 3); },
       [kept = std::vector<at::Tensor>()](const Calls& calls, std::int64_t s, c10::Device device) mutable {
         const at::Tensor x = rows(s, device).requires_grad_(true);
         (run_all(calls, x) * rows(s, device, 1)).sum().backward();
         std::vector<at::Tensor> results = kept;  // as the step before has left them
         kept = {x.grad()};
         results.push_back(x.grad());
         return results;
       }});
  torch::nn::Module nothing;
  OffloadEngine engine(nothing, Options(device_).offload("**").min_bytes(256));
  const auto graphed = make_graphed_callables(engine, {Callable("call", owning(exponentiates(weight_)))},
                                              {{rows(0, device_).requires_grad_(true)}});
  const auto step = [&](std::int64_t s) {
    weight_.mutable_grad() = at::Tensor();
    const at::Tensor x = rows(s, device_).requires_grad_(true);
    graphed[0]({x})[0].sum().backward();
    return std::vector<at::Tensor>{x.grad(), weight_.grad()};
  };
  const std::vector<at::Tensor> held = step(1);
  const std::vector<at::Tensor> copies{held[0].clone(), held[1].clone()};
  const std::vector<at::Tensor> next = step(2);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(at::equal(held[i], copies[i])) << i;
    EXPECT_FALSE(at::equal(next[i], copies[i])) << i << ": other data, other gradients";
    EXPECT_NE(held[i].const_data_ptr(), next[i].const_data_ptr()) << i;
  }
}

TEST_F(MemoryHazardTest, H11InputsAreNeitherBroadcastNorCastNorReadInAnotherLayout) {
  torch::nn::Module nothing;
  OffloadEngine engine(nothing, Options(device_).offload("**").min_bytes(256));
  const auto square = [&](std::int64_t s) { return at::cat({rows(s, device_), rows(s, device_, 3)}).contiguous(); };
  const TensorFunction body = [](const Tensors& in) { return Tensors{(in[0] * 2).exp().cumsum(0)}; };
  const auto graphed =
      make_graphed_callables(engine, {Callable("first", owning(body)), Callable("second", owning(body))},
                             {{square(0)}, {Sample::output_of(0)}});
  const auto refusal = [&](const at::Tensor& x) { return message_of<UsageError>([&] { (void)graphed[0]({x}); }); };
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "shape [1, 32], captured with [32, 32]", refusal(square(0).slice(0, 0, 1)));
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "dtype", refusal(square(0).to(at::kDouble)));
  // The same address, other strides: copied, where the input is the call's own; refused, where it is another call's output.
  const at::Tensor x = square(1);
  for (const at::Tensor& given : {x, x.t(), x}) {
    EXPECT_TRUE(at::equal(graphed[0]({given})[0], body({given})[0]));
  }
  const at::Tensor h = graphed[0]({x})[0];
  EXPECT_THROWS(UsageError, "second", (void)graphed[1]({h.t()}));
  EXPECT_TRUE(at::equal(graphed[1]({h})[0], body({body({x})[0]})[0]));
}

}  // namespace
}  // namespace sidestream::testing_model
