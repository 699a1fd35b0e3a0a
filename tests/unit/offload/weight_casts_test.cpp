#include "offload/weight_casts.h"

#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include "autocast_region.h"
#include "offload/autograd_engine.h"

namespace sidestream {
namespace {

// Classifies while packing, as the engine does.
class Recorder final : public SavedTensorSource {
 public:
  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override {
    struct Hooks final : torch::autograd::SavedVariableHooks {
      explicit Hooks(Recorder& recorder) : recorder_(recorder) {}
      void call_pack_hook(const at::Tensor& tensor) override {
        ++(is_weight_cast(tensor) ? recorder_.casts : recorder_.others);
        tensor_ = tensor.detach();
      }
      at::Tensor call_unpack_hook() override { return tensor_; }
      Recorder& recorder_;
      at::Tensor tensor_;
    };
    return std::make_unique<Hooks>(*this);
  }
  int casts = 0;
  int others = 0;
};

class WeightCasts : public ::testing::TestWithParam<bool> {};

TEST_P(WeightCasts, SavedCopiesOfWeightsAreKnown) {
  install_autograd_engine();
  at::Tensor weight = at::randn({8, 8}).requires_grad_(true);
  const at::Tensor input = at::randn({4, 8});
  Recorder recorder;
  at::Tensor y;
  {
    const testing_model::AutocastRegion autocast(at::kCPU, GetParam());
    const SavedTensorGuard hooks(&recorder);
    y = at::linear(at::linear(input, weight), weight).sum();
  }
  EXPECT_EQ(recorder.casts, 1) << "the first linear saves its input only, which needs no gradient";
  EXPECT_EQ(recorder.others, 2) << "the bf16 input and the hidden activation";
  y.backward();
  EXPECT_TRUE(weight.grad().defined());
}
INSTANTIATE_TEST_SUITE_P(Cache, WeightCasts, ::testing::Bool());

TEST(IsWeightCast, OnlyCastsOfLeavesThatRequireGrad) {
  const at::Tensor weight = at::randn({8, 8}).requires_grad_(true);
  const at::Tensor cast = weight.to(at::kBFloat16);
  EXPECT_TRUE(is_weight_cast(cast));
  EXPECT_TRUE(is_weight_cast(cast.t()));
  EXPECT_TRUE(is_weight_cast(cast.view({64}).slice(0, 8)));
  EXPECT_FALSE(is_weight_cast(cast.detach()));
  EXPECT_FALSE(is_weight_cast(weight));
  EXPECT_FALSE(is_weight_cast(weight.t()));
  EXPECT_FALSE(is_weight_cast(weight.mul(2))) << "an activation of the same dtype";
  EXPECT_FALSE(is_weight_cast(weight.mul(2).to(at::kBFloat16))) << "a cast of an activation";
  EXPECT_FALSE(is_weight_cast(at::randn({8}).to(at::kBFloat16)));
  EXPECT_FALSE(is_weight_cast(weight.sum(0, false, at::kDouble))) << "another dtype, but not a copy";
}

}  // namespace
}  // namespace sidestream
