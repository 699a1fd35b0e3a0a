#include "sidestream/clip_grad.h"

#include <cmath>
#include <limits>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/utils/clip_grad.h>

#include "expect_throws.h"
#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/device.h"
#include "sidestream/error.h"

namespace sidestream::testing_model {
namespace {

struct Clip {
  double max_norm;
  double norm_type;
};

class ClipGradTest : public testing::TestWithParam<Clip> {
 protected:
  torch::nn::Sequential with_gradients() const {
    torch::nn::Sequential model = layer_stack(3, device_);
    (model->forward(rows(0, device_)) * rows(0, device_, 1)).sum().backward();
    model->parameters()[1].mutable_grad() = at::Tensor();
    return model;
  }
  c10::Device device_ = find_device("sim");
};

TEST_P(ClipGradTest, ClipsAsLibTorchDoes) {
  const auto [max_norm, type] = GetParam();
  torch::nn::Sequential mine = with_gradients();
  torch::nn::Sequential plain = with_gradients();
  const at::Tensor norm = clip_grad_norm_(mine->parameters(), max_norm, type);
  const double theirs = torch::nn::utils::clip_grad_norm_(plain->parameters(), max_norm, type);
  EXPECT_EQ(norm.device(), device_);
  EXPECT_EQ(norm.dim(), 0);
  EXPECT_EQ(static_cast<double>(norm.cpu().item<float>()), theirs);
  EXPECT_TRUE(same(gradients(*mine), gradients(*plain)));
}

INSTANTIATE_TEST_SUITE_P(Norms, ClipGradTest,
                         testing::Values(Clip{0.5, 2.0}, Clip{1e6, 2.0}, Clip{0.1, 1.0}, Clip{0.0, 3.0},
                                         Clip{0.5, std::numeric_limits<double>::infinity()}, Clip{2.0, 0.0}));

using ClipGradEdgeTest = ClipGradTest;

TEST_F(ClipGradEdgeTest, GivesZeroWhereNothingHasAGradient) {
  torch::nn::Sequential model = layer_stack(1, device_);
  EXPECT_EQ(clip_grad_norm_(model->parameters(), 1.0).cpu().item<float>(), 0);
  EXPECT_EQ(clip_grad_norm_({}, 1.0).item<float>(), 0);
}

TEST_F(ClipGradEdgeTest, ClipsOneParameter) {
  const at::Tensor leaf = at::ones({4}, device_).requires_grad_(true);
  leaf.mutable_grad() = at::full({4}, 3.0, device_);
  EXPECT_EQ(clip_grad_norm_({leaf}, 1.5).cpu().item<float>(), 6);
  EXPECT_TRUE(at::allclose(leaf.grad().cpu(), at::full({4}, 0.75)));
}

TEST_F(ClipGradEdgeTest, RefusesByName) {
  at::Tensor here = at::ones({4}, device_).requires_grad_(true);
  at::Tensor there = at::ones({4}).requires_grad_(true);
  here.mutable_grad() = at::ones_like(here);
  there.mutable_grad() = at::ones_like(there);
  EXPECT_THROWS(UsageError, "clip those of one device", (void)clip_grad_norm_({here, there}, 1.0));
  EXPECT_THROWS(UsageError, "max_norm is -1", (void)clip_grad_norm_({here}, -1.0));
  EXPECT_THROWS(UsageError, "neither is nan", (void)clip_grad_norm_({here}, std::nan("")));
  EXPECT_THROWS(UsageError, "neither is nan", (void)clip_grad_norm_({here}, 1.0, std::nan("")));
}

}  // namespace
}  // namespace sidestream::testing_model
