// Flags in device memory that graphs read.
#include <string>
#include <utility>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/device.h"
#include "sidestream/device_flag.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/testing/simulator.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream::testing_model {
namespace {

/// A weight whose rounded values are cached by the first microbatch of a step, as quantized weights are.
struct CachedWeight {
  explicit CachedWeight(c10::Device device)
      : weight(rows(50, device).requires_grad_(true)), cache(at::zeros_like(weight).detach()), first(device, true) {}

  Tensors operator()(const Tensors& in) const {
    const at::Tensor rounded = (weight.detach() * 4).round() / 4;
    const at::Tensor used = at::where(first.tensor(), rounded, cache);
    cache.copy_(used);
    return {in[0] * (weight + (used - weight).detach())};
  }

  at::Tensor weight;
  at::Tensor cache;
  DeviceFlag first;
};

class DeviceFlagTest : public testing::Test {
 protected:
  [[nodiscard]] at::Tensor input(std::int64_t s, std::int64_t salt = 0) const {
    return rows(s, device_, salt).requires_grad_(true);
  }

  c10::Device device_ = find_device("sim");
  torch::nn::Sequential model_ = layer_stack(1, device_);
  OffloadEngine engine_{*model_, Options(device_)};
};

TEST_F(DeviceFlagTest, TheFirstMicrobatchFillsACacheInOneCapture) {
  const sim::OneThread one_thread;
  for (const char* name : {"issue", "late", "seed:1"}) {
    if (std::string(name) != "issue") {
      set_schedule(device_, Schedule::parse(name));
    }
    CachedWeight mine(device_);
    CachedWeight plain(device_);
    const auto graphed = make_graphed_callables(engine_, {Callable("cached", owning(mine))}, {{input(0)}});
    EXPECT_TRUE(at::equal(mine.cache.cpu(), at::zeros_like(plain.cache).cpu())) << "a capture leaves it as it was";
    for (std::int64_t s = 0; s < 4; ++s) {
      for (std::int64_t microbatch = 0; microbatch < 3; ++microbatch) {
        const at::Tensor x = input(s, microbatch);
        mine.first.set(microbatch == 0);
        const at::Tensor y = graphed[0]({x})[0];
        y.square().sum().backward();
        const at::Tensor x_plain = input(s, microbatch);
        plain.first.set(microbatch == 0);
        const at::Tensor y_plain = plain({x_plain})[0];
        y_plain.square().sum().backward();
        EXPECT_TRUE(same(
            {{"output", y}, {"input", x.grad()}, {"weight", mine.weight.grad()}, {"cache", mine.cache}},
            {{"output", y_plain}, {"input", x_plain.grad()}, {"weight", plain.weight.grad()}, {"cache", plain.cache}}))
            << "step " << s << ", microbatch " << microbatch;
        const at::NoGradGuard no_grad;
        for (CachedWeight* const one : {&mine, &plain}) {  // inside of a step the cache hides what the weight becomes
          one->weight.add_(one->weight.grad(), -0.5);
        }
      }
    }
    EXPECT_EQ(engine_.report().recaptures, 0);
  }
  set_schedule(device_, Schedule());
}

TEST_F(DeviceFlagTest, AnInteger) {
  DeviceFlag step(device_, 1);
  EXPECT_EQ(step.tensor().scalar_type(), at::kLong);
  const auto graphed = make_graphed_callables(
      engine_, {Callable("scaled", owning([step](const Tensors& in) { return Tensors{in[0] * (step.tensor() * 2)}; }))},
      {{input(0)}});
  for (const std::int64_t value : {3, 0, -5}) {
    step.set(value);
    EXPECT_EQ(step.value(), value);
    const at::Tensor x = input(value + 10);
    graphed[0]({x})[0].sum().backward();
    EXPECT_TRUE(at::equal(x.grad().cpu(), at::full({16, 32}, 2.0F * static_cast<float>(value))));
  }
}

TEST_F(DeviceFlagTest, ABoolIsTrueForAnyOtherNumberThanZeroAndCopiesShareIt) {
  DeviceFlag flag(device_, false);
  const DeviceFlag copy = flag;
  EXPECT_EQ(flag.tensor().scalar_type(), at::kBool);
  flag.set(256);
  EXPECT_EQ(copy.value(), 1);
  EXPECT_TRUE(copy.tensor().item<bool>());
  EXPECT_TRUE(copy.tensor().is_same(flag.tensor()));
}

TEST_F(DeviceFlagTest, SetInsideOfABodyIsRefused) {
  DeviceFlag flag(device_, true);
  const Callable callable("sets", owning([flag](const Tensors& in) {
                            DeviceFlag shared = flag;
                            shared.set(false);
                            return Tensors{in[0] * shared.tensor()};
                          }));
  EXPECT_THROWS(UsageError, "DeviceFlag::set was called inside a capture",
                (void)make_graphed_callables(engine_, {callable}, {{input(0)}}));
}

TEST_F(DeviceFlagTest, AMoveIsACopy) {
  DeviceFlag flag(device_, true);
  DeviceFlag moved = std::move(flag);
  moved.set(false);
  EXPECT_EQ(flag.value(), 0);  // NOLINT
  EXPECT_FALSE(flag.tensor().cpu().item<bool>());
}

// As plain training refuses it: the backward would take the other branch.
TEST_F(DeviceFlagTest, SetBetweenAForwardAndABackwardThatReadsItIsRefused) {
  DeviceFlag flag(device_, true);
  const auto graphed =
      make_graphed_callables(engine_, {Callable("branches", owning([flag](const Tensors& in) {
                                                  return Tensors{at::where(flag.tensor(), in[0], in[0] * 2)};
                                                }))},
                             {{input(0)}});
  at::Tensor y = graphed[0]({input(1)})[0];
  flag.set(false);
  EXPECT_THROWS(UsageError, "modified by an inplace operation", y.sum().backward());
  y.reset();
  const at::Tensor x = input(2);
  graphed[0]({x})[0].sum().backward();
  EXPECT_TRUE(at::equal(x.grad().cpu(), at::full({16, 32}, 2.0F)));
}

}  // namespace
}  // namespace sidestream::testing_model
