// The reference systems' tests of what captures keep, by their names.
#include <algorithm>
#include <memory>
#include <vector>

#include <ATen/Functions.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <gtest/gtest.h>

#include "conformance/fixture.h"
#include "models/layer_stack.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream::testing_model {
namespace {

/// The outputs of all runs of a body, without keeping them.
class OutputsOfRuns {
 public:
  void add(const at::Tensor& output) { all_.push_back(output.storage().getWeakStorageImpl()); }
  [[nodiscard]] std::size_t runs() const { return all_.size(); }
  /// Of the runs [first, last).
  [[nodiscard]] std::size_t alive(std::size_t first, std::size_t last) const {
    std::size_t count = 0;
    for (std::size_t i = first; i < last; ++i) {
      count += all_[i].use_count() > 0 ? 1 : 0;
    }
    return count;
  }

 private:
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> all_;
};

class ConformanceRetention : public conformance::ConformanceTest {
 protected:
  static constexpr std::size_t kWarmUps = 3;
  static constexpr std::size_t kPasses = 1 + kWarmUps;  // the sizing pass among them

  /// How many outputs of earlier warm-ups live when the next one begins, at most; and all that live behind the capture.
  void expect_released(const at::Tensor& sample) {
    const auto outputs = std::make_shared<OutputsOfRuns>();
    const auto most_alive = std::make_shared<std::size_t>(0);
    const auto function = owning([outputs, most_alive](const Tensors& in) {
      *most_alive = std::max(*most_alive, outputs->runs() > 1 ? outputs->alive(1, outputs->runs()) : 0);
      const at::Tensor y = in[0].exp() * 2;
      outputs->add(y);
      return Tensors{y};
    });
    const auto graphed = make_graphed_callables(engine_, {Callable("a", function)}, {{sample}},
                                                GraphOptions().num_warmup_iters(kWarmUps));
    ASSERT_EQ(outputs->runs(), kPasses + 1);
    EXPECT_EQ(*most_alive, 0U) << "a pass keeps no earlier pass's output";
    EXPECT_EQ(outputs->alive(0, kPasses), 0U);
    EXPECT_EQ(outputs->alive(kPasses, kPasses + 1), 1U) << "the capture's own is the graph's";
  }

  sim::OneThread one_thread_;  // autograd's own lets go of tensors a moment later
  torch::nn::Sequential model_ = layer_stack(1, device_);
  OffloadEngine engine_{*model_, Options(device_)};
};

TEST_F(ConformanceRetention, WarmupReleasesConsumedOutputs) {
  expect_released(rows(0, device_).requires_grad_(true));
  // What another callable reads lives until that one has been warmed up, and no longer.
  const auto outputs = std::make_shared<OutputsOfRuns>();
  const auto function = owning([outputs](const Tensors& in) {
    const at::Tensor y = in[0].exp();
    outputs->add(y);
    return Tensors{y};
  });
  const auto graphed =
      make_graphed_callables(engine_, {Callable("a", function), Callable("b", function), Callable("c", function)},
                             {{rows(0, device_).requires_grad_(true)}, {Sample::output_of(0)}, {Sample::output_of(1)}},
                             GraphOptions().num_warmup_iters(kWarmUps));
  ASSERT_EQ(outputs->runs(), 3 * (kPasses + 1));
  EXPECT_EQ(outputs->alive(0, 3 * kPasses), 0U);
}

TEST_F(ConformanceRetention, InferenceWarmupDoesNotRetainOutputs) { expect_released(rows(0, device_)); }

TEST_F(ConformanceRetention, ResetReleasesOnlyTheSelectedCallable) {
  constexpr std::int64_t kMiB = std::int64_t{1} << 20;
  const auto sample = [&](std::int64_t mebibytes) {
    return at::zeros({mebibytes, kMiB / 4}, at::TensorOptions().device(device_)).requires_grad_(true);
  };
  const auto allocated = [&] { return memory_use(device_).allocated; };
  const at::Tensor data = sample(5).detach();
  auto graphed =
      make_graphed_callables(engine_,
                             {Callable("a", [](const Tensors& in) { return Tensors{in[0] * 3}; }),
                              Callable("b", [](const Tensors& in) { return Tensors{in[0].sum(0, /*keepdim=*/true)}; }),
                              Callable("c", [](const Tensors& in) { return Tensors{in[0] * 5}; })},
                             {{sample(1)}, {sample(5)}, {sample(1)}});
  const auto expect_scaled = [&](std::size_t callable, float by) {
    const at::Tensor x = at::ones({1, kMiB / 4}, at::TensorOptions().device(device_)).requires_grad_(true);
    const at::Tensor y = graphed[callable]({x})[0];
    y.sum().backward();
    EXPECT_EQ(y.max().item<float>(), by);
    EXPECT_EQ(x.grad().min().item<float>(), by);
  };
  expect_scaled(0, 3);
  graphed[1]({data.clone().requires_grad_(true)})[0].sum().backward();
  const std::int64_t before = allocated();
  graphed[1].reset();
  EXPECT_EQ(before - allocated(), (5 + 1 + 1) * kMiB) << "its static input, its output, and the seed of that";
  const std::int64_t after = allocated();
  graphed[1].reset();
  EXPECT_EQ(allocated(), after);
  expect_scaled(0, 3);
  expect_scaled(2, 5);
  EXPECT_EQ(allocated(), after) << "nothing of the others was let go";
}

}  // namespace
}  // namespace sidestream::testing_model
