// The function of a call: its type, its address and what it owns are part of the call.
#include <array>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/linear.h>

#include "call_arguments_fixture.h"
#include "expect_throws.h"
#include "sidestream/call.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "warnings.h"

namespace sidestream::testing_model {
namespace {

at::Tensor times_two(const at::Tensor& x) { return x * 2; }
at::Tensor times_three(const at::Tensor& x) { return x * 3; }

TEST_F(CallArguments, AFunctionIsPartOfTheCall) {
  expect_two_captures([](Scaler& model, const at::Tensor& x, int which) {
    const at::Tensor h = model.forward(x);
    return which == 0 ? call("f", times_two, h).sum() : call("f", &times_three, h).sum();
  });
  expect_two_captures([](Scaler& model, const at::Tensor& x, int which) {
    const at::Tensor h = model.forward(x);
    return which == 0 ? call(
                            "f", [](const at::Tensor& y) { return y * 2; }, h)
                            .sum()
                      : call(
                            "f", [](const at::Tensor& y) { return y * 3; }, h)
                            .sum();
  });
  expect_two_captures([](Scaler& model, const at::Tensor& x, int which) {  // two overloads, the same two tensors
    return which == 0 ? call(
                            "f", [](Scaler& m, const at::Tensor& a, const at::Tensor& b) { return m.forward(a, b); },
                            model, x, x * 2)
                            .sum()
                      : call(
                            "f", [](Scaler& m, const std::pair<at::Tensor, at::Tensor>& p) { return m.forward(p); },
                            model, std::make_pair(x, at::Tensor(x * 2)))
                            .sum();
  });
  expect_one_capture([](Scaler& model, const at::Tensor& x, std::int64_t /*s*/) {
    return call("scaled", &Scaler::scaled, model, x, 0.5).sum();
  });
}

// A lambda's captured factor was frozen at its first value.
TEST_F(CallArguments, AnOwningFunctionIsComparedByItsBytes) {
  expect_two_captures([](Scaler& model, const at::Tensor& x, int which) {
    const double factor = which == 0 ? 2 : 3;
    return call("owning", owning([factor](Scaler& m, const at::Tensor& y) { return m.scaled(y, factor); }), model, x)
        .sum();
  });
}

// An object without members has one byte, which nobody writes: it holds what the heap had there.
TEST_F(CallArguments, AnOwningFunctionWithoutStateIsTheSameWhateverItsByteHolds) {
  const auto function = [](const at::Tensor& x) { return x.tanh(); };
  const auto behind = [&](int byte) {
    constexpr std::size_t kControlBlock = 24;
    void* const used = ::operator new(kControlBlock);
    std::memset(used, byte, kControlBlock);
    ::operator delete(used);
    return owning(function);
  };
  const auto first = behind(1);
  EXPECT_TRUE(first.same_as(behind(2)));
}

TEST_F(CallArguments, AnOwningFunctionThatIsMadeOnceIsCapturedOnce) {
  const auto function =
      owning([factors = std::vector<double>{2, 3}](Scaler& m, const at::Tensor& y) { return m.scaled(y, factors[1]); });
  expect_one_capture(
      [&](Scaler& model, const at::Tensor& x, std::int64_t /*s*/) { return call("owning", function, model, x).sum(); });
}

TEST_F(CallArguments, AnOwningFunctionThatIsMadeAnewEndsAtTheBound) {
  ExpectedWarnings warnings;
  OffloadEngine engine(*model_, options().call_options(CallOptions().max_captures(3)));
  expect_plain(engine, 0, 8, [](Scaler& model, const at::Tensor& x, std::int64_t s) {
    const std::vector<double> factors{double(s), 3};
    return call("owning", owning([factors](Scaler& m, const at::Tensor& y) { return m.scaled(y, factors[0]); }), model,
                x)
        .sum();
  });
  EXPECT_EQ(engine.report().captures, 6);
  EXPECT_EQ(warnings.take().size(), 1U);
}

// A module was taken for a function whose name had been at its address.
TEST_F(CallArguments, AModuleAtTheAddressOfAFormerNameIsAModule) {
  alignas(torch::nn::LinearImpl) std::array<char, sizeof(torch::nn::LinearImpl)> memory{};
  OffloadEngine engine(*model_, Options(device_).offload("**").min_bytes(16));
  const at::Tensor x = rows(0, device_);
  {
    auto step = engine.step();
    std::strcpy(memory.data(), "former");
    call(memory.data(), &times_two, x.exp().requires_grad_(true)).sum().backward();
    step.finish();
  }
  engine.reset();
  const std::shared_ptr<torch::nn::LinearImpl> layer(new (memory.data()) torch::nn::LinearImpl(x.size(-1), 2),
                                                     [](torch::nn::LinearImpl* made) { made->~LinearImpl(); });
  layer->to(device_);
  model_->register_module("layer", layer);
  auto step = engine.step();
  call(layer, x.exp()).sum().backward();
  step.finish();
  ASSERT_EQ(engine.report().groups.size(), 1U);
  EXPECT_EQ(engine.report().groups[0].name, "layer");
  model_->unregister_module("layer");
}

TEST_F(CallArguments, NoModuleAndNoNameAreRefused) {
  const at::Tensor x = rows(0, device_);
  OffloadEngine engine(*model_, options());
  for (const bool in_step : {false, true}) {
    std::optional<Step> step;
    if (in_step) {
      step.emplace(engine.step());
    }
    EXPECT_THROWS(UsageError, "no module", (void)call(static_cast<Scaler*>(nullptr), x));
    EXPECT_THROWS(UsageError, "no module", (void)call(std::shared_ptr<Scaler>(), x));
    EXPECT_THROWS(UsageError, "no module", (void)call(torch::nn::Linear(nullptr), x));
    torch::nn::AnyModule any;
    EXPECT_THROWS(UsageError, "no module", (void)call(any, x));
    EXPECT_THROWS(UsageError, "an empty name", (void)call(static_cast<const char*>(nullptr), times_two, x));
    EXPECT_THROWS(UsageError, "an empty name", (void)call("", times_two, x));
  }
}

TEST_F(CallArguments, ACallThatCannotBeCapturedIsAnErrorOfEachStepUntilReset) {
  OffloadEngine engine(*model_, options());
  const Loss unused = [](Scaler& model, const at::Tensor& x, std::int64_t /*s*/) {
    return call(
               "f", [](Scaler& m, const at::Tensor& /*a*/, const at::Tensor& b) { return m.forward(b); }, model,
               x.detach().requires_grad_(true), x)
        .sum();
  };
  for (std::int64_t s = 0; s < 4; s += 2) {
    expect_plain(engine, s, s + 1, unused);  // eagerly
    for (int i = 0; i < 2; ++i) {
      EXPECT_THROWS(UsageError, "graphed call \"f\": input 0 requires a gradient but gets none", (void)engine.step());
    }
    engine.reset();
  }
  expect_plain(engine, 4, 7, [](Scaler& model, const at::Tensor& x, std::int64_t /*s*/) {
    return call("scaled", &Scaler::scaled, model, x, 0.5).sum();
  });
}

}  // namespace
}  // namespace sidestream::testing_model
