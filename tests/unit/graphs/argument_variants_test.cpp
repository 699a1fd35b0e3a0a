// Arguments that are one tensor, or have other strides than captured, are another variant of a call.
#include <cstdint>
#include <memory>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "guard_models.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"

namespace sidestream::testing_model {
namespace {

class ArgumentVariants : public testing::Test {
 protected:
  [[nodiscard]] Options options() const { return Options(device_).min_bytes(64).graph("**").offload("**"); }

  c10::Device device_ = find_device("sim");
};

/// Takes two tensors.
class Pair : public torch::nn::Module {
 public:
  at::Tensor forward(const at::Tensor& a, const at::Tensor& b) {
    return at::linear(a, weight_).tanh() * b + (a.is_same(b) ? 1.0 : 2.0) * a * weight_;
  }

 private:
  at::Tensor weight_ = register_parameter("weight", at::arange(64, at::kFloat).view({8, 8}) * 0.01 - 0.3);
};
class PairModel : public torch::nn::Module {
 public:
  std::shared_ptr<Pair> first = register_module("first", std::make_shared<Pair>());
  std::shared_ptr<Pair> second = register_module("second", std::make_shared<Pair>());
};

at::Tensor square_rows(std::int64_t s, c10::Device device) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(700 + s));
  return at::randn({8, 8}, generator, at::kFloat).to(device);
}

TEST_F(ArgumentVariants, ATransposedLinkedOutputIsNoExactMatch) {
  Twins<PairModel> twins(options());
  const auto act = [&](int form) {
    return [this, form](PairModel& model, std::int64_t s) {
      const at::Tensor other = square_rows(s, device_);
      const at::Tensor h = call(model.first.get(), square_rows(s + 50, device_), other);
      call(model.second.get(), form == 0 ? h : form == 1 ? h.t() : h.slice(0, 0, 8, 1).flip(0), other).sum().backward();
    };
  };
  twins.expect_plain(0, 3, act(0));
  EXPECT_EQ(twins.replays(), 4);
  for (const int form : {1, 2, 0, 1}) {
    twins.expect_plain(3, 6, act(form));
    EXPECT_EQ(twins.replays(), 4) << form;
  }
}

TEST_F(ArgumentVariants, ACallableThatIsGivenATransposedLinkedOutputRefusesIt) {
  PairModel model;
  model.to(device_);
  OffloadEngine engine(model, Options(device_));
  const auto graphed =
      make_graphed_callables(engine,
                             {Callable("first", [](const Tensors& in) { return Tensors{in[0] * 2}; }),
                              Callable("second", [](const Tensors& in) { return Tensors{in[0].tanh()}; })},
                             {{square_rows(0, device_)}, {Sample::output_of(0)}});
  const at::Tensor h = graphed[0]({square_rows(1, device_)})[0];
  EXPECT_THROWS(UsageError, "output of an earlier call", (void)graphed[1]({h.t()}));
  EXPECT_TRUE(at::equal(graphed[1]({h})[0].cpu(), h.tanh().cpu()));
}

TEST_F(ArgumentVariants, ArgumentsThatAreOneTensorAreAnotherVariant) {
  Twins<PairModel> twins(options());
  const auto act = [&](bool same) {
    return [this, same](PairModel& model, std::int64_t s) {
      const at::Tensor a = square_rows(s, device_).requires_grad_(true);
      const at::Tensor b = same ? a : square_rows(s + 50, device_).requires_grad_(true);
      const at::Tensor h = call(model.first.get(), a, b);
      call(model.second.get(), h, same ? h : h.view_as(h)).sum().backward();
      model.zero_grad();
      (a.grad() + b.grad()).sum();
    };
  };
  for (const bool same : {false, true, false, true}) {
    twins.expect_plain(0, 4, act(same));
    EXPECT_EQ(twins.replays(), 4);
  }
  EXPECT_EQ(twins.captures(), 8);
}

TEST_F(ArgumentVariants, GradientsOfOneTensorAsSeveralArguments) {
  Twins<PairModel> twins(options());
  for (std::int64_t s = 0; s < 4; ++s) {
    std::vector<at::Tensor> grads;
    twins.expect_plain(s, [&](PairModel& model, std::int64_t step) {
      const at::Tensor a = square_rows(step, device_).requires_grad_(true);
      const at::Tensor h = call(model.first.get(), a, a);
      call(model.second.get(), h, h).sum().backward();
      grads.push_back(a.grad().cpu());
    });
    EXPECT_TRUE(at::equal(grads[0], grads[1])) << "step " << s;
  }
  EXPECT_EQ(twins.replays(), 4);
}

TEST_F(ArgumentVariants, OtherStridesAreAnotherVariant) {
  Twins<PairModel> twins(options());
  const auto act = [&](bool transposed) {
    return [this, transposed](PairModel& model, std::int64_t s) {
      const at::Tensor a = square_rows(s, device_);
      call(model.first.get(), transposed ? a.t() : a, square_rows(s + 50, device_)).sum().backward();
    };
  };
  for (const bool transposed : {false, true, false}) {
    twins.expect_plain(0, 4, act(transposed));
    EXPECT_EQ(twins.replays(), 2);
  }
  EXPECT_EQ(twins.captures(), 4);
}

}  // namespace
}  // namespace sidestream::testing_model
