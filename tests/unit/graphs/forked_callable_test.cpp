// Callables that run a part of their forward on a stream of their own, as models with shared experts do.
#include <vector>

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include "graphs/engine_state.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/scope.h"
#include "stream_order.h"
#include "unit/graphs/layer_stack.h"
#include "unit/runtime/every_order.h"

namespace sidestream {
namespace {

using testing_model::order;
using testing_model::rows;

constexpr std::uint64_t kSeeds = 100;
constexpr std::size_t kLayers = 4;

class ForkedCallable : public testing::TestWithParam<std::int64_t> {
 protected:
  void TearDown() override { synchronize(device_); }

  [[nodiscard]] c10::Stream current() { return engine_.state()->runtime().current_stream(); }

  /// The branch is joined after the scope has ended: its copies must not start from the current stream alone.
  at::Tensor forward(const at::Tensor& given) {
    const at::Tensor h = given.mul(1.1);
    at::Tensor branch;
    at::Tensor own;
    {
      const OffloadScope scope("experts");
      order(current(), branch_.get());
      {
        const c10::StreamGuard on_branch(branch_.get());
        branch = h.exp().mul(0.1).tanh();
      }
      own = h.sigmoid();
    }
    const OffloadScope scope("rest");
    const at::Tensor rest = own.tanh();
    order(branch_.get(), current());
    return rest + branch;
  }

  sim::OneThread one_thread_;
  c10::Device device_ = find_device("sim");
  torch::nn::Module model_;
  OffloadEngine engine_{model_, Options(device_).min_bytes(1024).offload("**")};
  OwnedStream branch_ = engine_.state()->runtime().create_stream();
};

TEST_P(ForkedCallable, EveryOrderGivesPlainGradients) {
  std::vector<Callable> callables;
  std::vector<std::vector<Sample>> samples;
  for (std::size_t i = 0; i < kLayers; ++i) {
    callables.emplace_back("layers." + std::to_string(i), [this](const Tensors& x) { return Tensors{forward(x[0])}; });
    samples.push_back(
        {i > 0 ? Sample::output_of(static_cast<std::int64_t>(i) - 1) : Sample(rows(0, device_).requires_grad_(true))});
  }
  auto layers = make_graphed_callables(engine_, std::move(callables), samples, GraphOptions().side_streams(GetParam()));
  const auto gradient = [&](bool graphed, std::int64_t s) {
    const at::Tensor x = rows(s, device_).requires_grad_(true);
    at::Tensor h = x;
    for (std::size_t i = 0; i < kLayers; ++i) {
      h = graphed ? layers[i]({h})[0] : forward(h);
    }
    (h * rows(s, device_, 1)).sum().backward();
    return x.grad();
  };
  for (std::int64_t s = 0; s < 2; ++s) {
    EXPECT_TRUE(at::equal(gradient(true, s).cpu(), gradient(false, s).cpu())) << "step " << s;
  }
  const at::Tensor plain = gradient(false, 2);
  synchronize(device_);
  const auto expected = sim::raw_bytes({plain});
  sim::Recording recording;
  const at::Tensor mine = gradient(true, 2);
  recording.stop();
  ASSERT_EQ(sim::raw_bytes({mine}), expected);
  sim::expect_same_in_every_order(recording, {mine}, expected, kSeeds);
  EXPECT_GT(engine_.report().pinned_bytes, 0);
}

INSTANTIATE_TEST_SUITE_P(SideStreams, ForkedCallable, testing::Values(1, 2));

}  // namespace
}  // namespace sidestream
