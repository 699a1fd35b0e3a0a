// Gradients of parameters in the graphs' own memory, held while their call replays, on a GPU.
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include "gpu/gpu_fixture.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"

namespace sidestream {
namespace {

class GpuGradientPolicyTest : public gpu::Gpu, public testing::WithParamInterface<GradientPolicy> {
 protected:
  static constexpr std::int64_t kSide = 512;
  static constexpr int kSteps = 5;

  [[nodiscard]] at::Tensor data(int s) const { return at::full({kSide, kSide}, 0.25 * s, options()); }
  [[nodiscard]] at::Tensor weight(double value) const {
    return at::full({kSide, kSide}, value, options()).requires_grad_(true);
  }
  /// The gradients of each step. `keep`: they are held to the end; else they are added up over two steps.
  std::vector<at::Tensor> run(const TensorFunction& first, const TensorFunction& second,
                              const std::vector<at::Tensor>& weights, bool keep) const {
    std::vector<at::Tensor> held;
    for (int s = 1; s <= kSteps; ++s) {
      second({first({data(s).requires_grad_(true)})[0]})[0].sum().backward();
      for (const at::Tensor& parameter : weights) {
        if (keep || s % 2 == 0) {
          // What a graph adds into is the graph's: a later replay takes it again.
          held.push_back(GetParam() == GradientPolicy::accumulated ? parameter.grad().clone() : parameter.grad());
          parameter.mutable_grad() = at::Tensor();
        }
      }
    }
    for (const at::Tensor& parameter : weights) {
      parameter.mutable_grad() = at::Tensor();
    }
    for (at::Tensor& gradient : held) {
      gradient = gradient.cpu();
    }
    return held;
  }
};

TEST_P(GpuGradientPolicyTest, GradientsAreThoseOfPlainTraining) {
  const std::vector<at::Tensor> weights{weight(0.5), weight(0.75)};
  const auto scaled_by = [&](std::size_t i) {
    return TensorFunction([w = weights[i]](const Tensors& in) { return Tensors{(in[0] * w).tanh()}; });
  };
  const TensorFunction first = scaled_by(0);
  const TensorFunction second = scaled_by(1);
  torch::nn::Module model;
  OffloadEngine engine(model, Options(options().device()));
  const std::vector<GraphedCallable> graphed = make_graphed_callables(
      engine, {Callable("first", owning(first)), Callable("second", owning(second))},
      {{data(0).requires_grad_(true)}, {Sample::output_of(0)}}, GraphOptions().gradients("**", GetParam()));
  const bool may_be_kept = GetParam() != GradientPolicy::accumulated;
  for (const bool keep : {false, may_be_kept}) {
    const std::vector<at::Tensor> mine = run(graphed[0], graphed[1], weights, keep);
    const std::vector<at::Tensor> plain = run(first, second, weights, keep);
    ASSERT_EQ(mine.size(), plain.size());
    for (std::size_t i = 0; i < mine.size(); ++i) {
      EXPECT_TRUE(at::equal(mine[i], plain[i])) << i << (keep ? ", held" : ", added up");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, GpuGradientPolicyTest,
                         testing::Values(GradientPolicy::cloned, GradientPolicy::owned, GradientPolicy::accumulated));

}  // namespace
}  // namespace sidestream
