#include "offload/nested_backward.h"

#include <string>
#include <thread>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include "expect_throws.h"
#include "offload/autograd_engine.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// Runs backward() inside its backward.
struct Checkpointed : torch::autograd::Function<Checkpointed> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x.mul(2);
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               torch::autograd::tensor_list grads) {
    const at::AutoGradMode with_grad(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_(true);
    x.mul(2).backward(grads[0]);
    return {x.grad()};
  }
};

class NestedBackwardTest : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override { install_autograd_engine(); }
  /// On the CPU a backward pass runs on the calling thread, on the simulated device on autograd's.
  void run() const {
    const at::Tensor x = at::ones({4}, at::TensorOptions().device(device_)).requires_grad_(true);
    Checkpointed::apply(x).sum().backward();
    EXPECT_TRUE(x.grad().defined());
  }
  c10::Device device_ = GetParam() ? c10::DeviceType::PrivateUse1 : c10::DeviceType::CPU;
};

TEST_P(NestedBackwardTest, IsRefusedWhereTheRefusalStandsAndInItsBackwardPasses) {
  {
    const NestedBackwardRefusal refusal;
    EXPECT_THROWS(CaptureError, "backward() inside its own backward", run());
    const NestedBackwardRefusal nested;
    EXPECT_THROWS(CaptureError, "backward() inside its own backward", run());
  }
  run();
}

TEST_P(NestedBackwardTest, IsNotRefusedOnAnotherThread) {
  const NestedBackwardRefusal refusal;
  std::string message;
  std::thread([&] {
    try {
      run();
    } catch (const std::exception& error) {
      message = error.what();
    }
  }).join();
  EXPECT_EQ(message, "");
}

INSTANTIATE_TEST_SUITE_P(Devices, NestedBackwardTest, testing::Values(false, true),
                         [](const testing::TestParamInfo<bool>& info) { return info.param ? "sim" : "cpu"; });

}  // namespace
}  // namespace sidestream
