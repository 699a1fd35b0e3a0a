#include "tools/cli/gradient_comparison.h"

#include <limits>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include "sidestream/error.h"

namespace sidestream::cli {
namespace {

at::Tensor with_gradient(const at::Tensor& gradient) {
  at::Tensor parameter = at::zeros({4});
  parameter.requires_grad_();
  parameter.mutable_grad() = gradient;
  return parameter;
}

NamedTensors parameters(const at::Tensor& a, const at::Tensor& b) {
  return {{"a", with_gradient(a)}, {"b", with_gradient(b)}};
}

TEST(GradientComparison, EqualGradientsAreEqual) {
  GradientComparison comparison(at::kFloat, 100, /*exact=*/true);
  EXPECT_TRUE(comparison.compare(parameters(at::full({4}, 1.5), at::full({4}, 2.5)),
                                 parameters(at::full({4}, 1.5), at::full({4}, 2.5))));
  EXPECT_TRUE(comparison.all_equal());
  EXPECT_TRUE(comparison.within_bound());
  EXPECT_EQ(comparison.steps(), 1);
  EXPECT_EQ(comparison.explanation(), "");
}

TEST(GradientComparison, OneBitIsSeenAndNamed) {
  GradientComparison comparison(at::kFloat, 100, /*exact=*/true);
  at::Tensor changed = at::full({4}, 2.5);
  changed[3] = std::nextafter(2.5F, 3.0F);
  EXPECT_FALSE(
      comparison.compare(parameters(at::full({4}, 1.5), changed), parameters(at::full({4}, 1.5), at::full({4}, 2.5))));
  EXPECT_FALSE(comparison.all_equal());
  EXPECT_FALSE(comparison.within_bound());
  EXPECT_EQ(comparison.parameters()[0].differing_steps, 0);
  EXPECT_EQ(comparison.parameters()[1].name, "b");
  EXPECT_EQ(comparison.parameters()[1].differing_steps, 1);
  EXPECT_NEAR(comparison.parameters()[1].worst_error, 0x1p-22 / 5, 1e-9);
}

TEST(GradientComparison, BoundAllowsReorderedSumsOnly) {
  GradientComparison comparison(at::kFloat, 10000, /*exact=*/false);
  EXPECT_GT(comparison.bound(), 1e-5);
  EXPECT_LT(comparison.bound(), 1e-4);
  EXPECT_NE(comparison.explanation(), "");
  const NamedTensors reference = parameters(at::full({4}, 1.0), at::full({4}, 1.0));
  comparison.compare(parameters(at::full({4}, 1.000001), at::full({4}, 1.0)), reference);
  EXPECT_FALSE(comparison.all_equal());
  EXPECT_TRUE(comparison.within_bound());
  comparison.compare(parameters(at::full({4}, 1.001), at::full({4}, 1.0)), reference);
  EXPECT_FALSE(comparison.within_bound());
  EXPECT_EQ(comparison.parameters()[0].differing_steps, 2);
}

TEST(GradientComparison, MissingAndNotANumberNeverPass) {
  const at::Tensor one = at::full({4}, 1.0);
  const at::Tensor not_a_number = at::full({4}, std::numeric_limits<double>::quiet_NaN());
  GradientComparison missing(at::kFloat, 1'000'000'000, /*exact=*/false);
  EXPECT_FALSE(missing.compare(parameters(one, {}), parameters(one, one)));
  EXPECT_FALSE(missing.within_bound());
  GradientComparison nan(at::kFloat, 1'000'000'000, /*exact=*/false);
  EXPECT_FALSE(nan.compare(parameters(one, not_a_number), parameters(one, not_a_number)));
  EXPECT_FALSE(nan.within_bound());
  GradientComparison both_missing(at::kFloat, 1, /*exact=*/true);
  EXPECT_TRUE(both_missing.compare(parameters(one, {}), parameters(one, {})));
}

TEST(GradientComparison, OtherNumberOfParametersIsRefused) {
  const at::Tensor one = at::full({4}, 1.0);
  GradientComparison comparison(at::kFloat, 1, /*exact=*/true);
  EXPECT_THROW(comparison.compare(parameters(one, one), {{"a", with_gradient(one)}}), UsageError);
}

}  // namespace
}  // namespace sidestream::cli
