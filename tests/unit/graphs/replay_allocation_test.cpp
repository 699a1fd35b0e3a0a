// What a replay takes from the heap: a program whose operator new counts.
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "graphs/engine/engine_access.h"
#include "models/layer_stack.h"
#include "runtime/forwarding_runtime.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"
#include "unit/graphs/counted_heap.h"

namespace sidestream {
namespace {

using testing_model::heap_allocations;
using testing_model::rows;

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
    calls_ = make_graphed_callables(
        engine_, {Callable("first", owning(body(first))), Callable("second", owning(body(second)))},
        {{rows(0, device_).requires_grad_(true)}, {Sample::output_of(0)}}, GraphOptions().accumulate_in_graph(true));
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

/// Knows what the device itself takes from the heap: the simulator's queues do, a driver's are its own.
class CountingRuntime final : public ForwardingRuntime {
 public:
  using ForwardingRuntime::ForwardingRuntime;
  void record(const Event& event, c10::Stream stream) override {
    count([&] { inner().record(event, stream); });
  }
  void wait(c10::Stream stream, const Event& event) override {
    count([&] { inner().wait(stream, event); });
  }
  void record(const ExternalEvent& event, c10::Stream stream) override {
    count([&] { inner().record(event, stream); });
  }
  void wait(c10::Stream stream, const ExternalEvent& event) override {
    count([&] { inner().wait(stream, event); });
  }
  void launch(const Graph& graph, c10::Stream stream) override {
    count([&] { inner().launch(graph, stream); });
  }
  [[nodiscard]] std::int64_t taken() const noexcept { return taken_; }

 private:
  template <class Call>
  void count(const Call& call) {
    const std::int64_t before = heap_allocations();
    call();
    taken_ += heap_allocations() - before;
  }
  std::int64_t taken_ = 0;
};

/// What autograd and operators need for a call of this kind, whoever runs it: a node with an edge to each leaf, an output over memory
/// that is there, a copy of the input and of the incoming gradient, a clone of the input's gradient.
class BareCall final : public std::enable_shared_from_this<BareCall> {
 public:
  BareCall(std::vector<at::Tensor> leaves, const at::Tensor& like, bool gives_tensors)
      : leaves_(std::move(leaves)), memory_(at::empty_like(like)), gives_tensors_(gives_tensors) {}

  Tensors operator()(const Tensors& inputs) {
    {
      const at::NoGradGuard no_grad;
      memory_.copy_(inputs[0].detach(), /*non_blocking=*/true);
    }
    Tensors outputs{over_memory()};
    auto node = std::make_shared<Node>(shared_from_this());
    torch::autograd::edge_list edges;
    edges.reserve(leaves_.size() + 1);
    edges.push_back(torch::autograd::impl::gradient_edge(inputs[0]));
    for (const at::Tensor& leaf : leaves_) {
      edges.push_back(torch::autograd::impl::gradient_edge(leaf));
    }
    node->set_next_edges(std::move(edges));
    torch::autograd::set_history(outputs[0], node);
    return outputs;
  }

 private:
  class Node final : public torch::autograd::Node {
   public:
    explicit Node(std::shared_ptr<BareCall> call) : call_(std::move(call)) {}
    torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
      const at::NoGradGuard no_grad;
      call_->memory_.copy_(grads[0], /*non_blocking=*/true);
      torch::autograd::variable_list results;
      results.reserve(call_->leaves_.size() + 1);
      results.push_back(at::empty_like(call_->memory_));
      results[0].copy_(call_->memory_, /*non_blocking=*/true);
      for (std::size_t i = 0; i < call_->leaves_.size(); ++i) {
        results.push_back(call_->gives_tensors_ ? call_->over_memory() : at::Tensor());
      }
      return results;
    }

   private:
    std::shared_ptr<BareCall> call_;
  };

  [[nodiscard]] at::Tensor over_memory() const {
    auto tensor =
        at::detail::make_tensor<c10::TensorImpl>(c10::Storage(memory_.storage()), memory_.key_set(), memory_.dtype());
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(memory_.sizes(), memory_.strides());
    return tensor;
  }

  std::vector<at::Tensor> leaves_;
  at::Tensor memory_;
  bool gives_tensors_;
};

class ReplayPathAllocationTest : public testing::TestWithParam<GradientPolicy> {
 protected:
  struct Taken {
    std::int64_t forward;
    std::int64_t backward;
  };
  template <class Call>
  Taken taken(Call& call) {
    const Tensors given{input_};
    Taken result{};
    for (int repeat = 0; repeat < 4; ++repeat) {
      for (const at::Tensor& weight : weights_) {
        if (GetParam() != GradientPolicy::accumulated) {  // which takes operators to attach one anew
          weight.mutable_grad() = at::Tensor();
        }
      }
      const std::int64_t of_device = runtime_->taken();
      const std::int64_t before = heap_allocations();
      const at::Tensor y = call(given)[0];
      const std::int64_t of_device_forward = runtime_->taken() - of_device;
      const std::int64_t between = heap_allocations();
      y.backward(seed_);
      const std::int64_t of_device_backward = runtime_->taken() - of_device - of_device_forward;
      result = {between - before - of_device_forward, heap_allocations() - between - of_device_backward};
    }
    return result;
  }

  static constexpr std::int64_t kWeights = 9;
  c10::Device device_ = find_device("sim");
  torch::nn::Module model_;
  std::shared_ptr<CountingRuntime> runtime_ = std::make_shared<CountingRuntime>(make_runtime(device_));
  OffloadEngine engine_ = EngineAccess::engine(model_, Options(device_), runtime_);
  at::Tensor input_ = rows(3, device_).requires_grad_(true);
  at::Tensor seed_ = rows(4, device_);
  std::vector<at::Tensor> weights_;
};

TEST_P(ReplayPathAllocationTest, AReplayTakesWhatABareNodeDoes) {
  for (std::int64_t i = 0; i < kWeights; ++i) {
    weights_.push_back(rows(10 + i, device_).requires_grad_(true));
  }
  const TensorFunction body = [this](const Tensors& in) {
    at::Tensor h = in[0];
    for (const at::Tensor& weight : weights_) {
      h = h * weight;
    }
    return Tensors{h};
  };
  GraphedCallable graphed = make_graphed_callables(engine_, {Callable("call", owning(body))}, {{input_}},
                                                   GraphOptions().gradients("call", GetParam()))[0];
  const bool tensors = GetParam() != GradientPolicy::accumulated;
  const auto bare = std::make_shared<BareCall>(tensors ? weights_ : std::vector<at::Tensor>(), input_, tensors);
  const Taken replay = taken(graphed);
  const Taken least = taken(*bare);
  EXPECT_GT(least.forward, 0) << "operator new is not this program's";
  EXPECT_LE(replay.forward, least.forward);
  EXPECT_LE(replay.backward, least.backward);
}

INSTANTIATE_TEST_SUITE_P(Policies, ReplayPathAllocationTest,
                         testing::Values(GradientPolicy::owned, GradientPolicy::accumulated));

}  // namespace
}  // namespace sidestream
