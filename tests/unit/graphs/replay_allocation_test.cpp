// What a replay takes from the heap: a program whose operator new counts.
#include <cstdint>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "models/layer_stack.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"
#include "unit/graphs/counted_heap.h"

namespace sidestream::testing_model {
namespace {

/// What 0.1.0 took for one forward of the two calls below, and for one backward, LibTorch's own included.
constexpr std::int64_t kForwardBefore = 42;
constexpr std::int64_t kBackwardBefore = 108;

class ReplayAllocationTest : public testing::Test {
 protected:
  struct Taken {
    std::int64_t forward;
    std::int64_t backward;
  };

  ReplayAllocationTest() {
    const auto body = [](const at::Tensor& weight) {
      return [weight](const Tensors& in) { return Tensors{(in[0] * weight).tanh()}; };
    };
    const at::Tensor first = rows(1, device_).slice(0, 0, 1).clone().requires_grad_(true);
    const at::Tensor second = rows(2, device_).slice(0, 0, 1).clone().requires_grad_(true);
    calls_ = make_graphed_callables(engine_,
                                    {Callable("first", owning(body(first))), Callable("second", owning(body(second)))},
                                    {{rows(0, device_).requires_grad_(true)}, {Sample::output_of(0)}},
                                    GraphOptions().gradients("**", GradientPolicy::accumulated));
  }

  Taken replay(std::vector<at::Tensor>* held) {
    const std::vector<Tensors> given{{input_}};
    const std::int64_t before = heap_allocations();
    at::Tensor y = calls_[0](given[0])[0];
    y = calls_[1]({y})[0];
    const std::int64_t between = heap_allocations();
    y.backward(seed_);
    const Taken taken{between - before, heap_allocations() - between};
    if (held != nullptr) {
      held->push_back(y.detach());
    }
    return taken;
  }

  c10::Device device_ = find_device("sim");
  torch::nn::Module model_;
  OffloadEngine engine_{model_, Options(device_)};
  std::vector<GraphedCallable> calls_;
  at::Tensor input_ = rows(3, device_).requires_grad_(true);
  at::Tensor seed_ = rows(4, device_);
};

TEST_F(ReplayAllocationTest, NothingIsAddedWhereNobodyHoldsAnOutput) {
  (void)replay(nullptr);
  (void)replay(nullptr);  // the input has its gradient from here on
  for (int repeat = 0; repeat < 5; ++repeat) {
    const Taken taken = replay(nullptr);
    EXPECT_GT(taken.forward, 0) << "operator new is not this program's";
    EXPECT_LE(taken.forward, kForwardBefore);
    EXPECT_LE(taken.backward, kBackwardBefore);
  }
}

TEST_F(ReplayAllocationTest, AHeldOutputTakesMoreOnce) {
  (void)replay(nullptr);
  (void)replay(nullptr);
  const Taken usual = replay(nullptr);
  std::vector<at::Tensor> held;
  EXPECT_EQ(replay(&held).forward, usual.forward) << "it is held from the end on";
  EXPECT_GT(replay(nullptr).forward, usual.forward) << "its copy, and another storage";
  EXPECT_EQ(replay(nullptr).forward, usual.forward);
}

}  // namespace
}  // namespace sidestream::testing_model
