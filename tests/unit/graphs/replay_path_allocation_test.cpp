// What a replay takes from the heap beside what LibTorch takes: a program whose operator new counts. LibTorch's share is not
// guessed: a bare call, which has no code of ours, queues the same copies of the inputs, makes an autograd node with the same edges,
// gives out an output over memory that is there and gives gradients in the same way. The device's share, the simulator's queues, is
// counted by a runtime between and taken off. What a replay takes beyond both is ours, and there is nothing.
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
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
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"
#include "unit/graphs/counted_heap.h"

namespace sidestream::testing_model {
namespace {

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
/// that is there, a copy of each input and of the incoming gradient, a clone of each input's gradient; for a weight the same, or a
/// tensor over memory that is there, or nothing.
class BareCall final : public std::enable_shared_from_this<BareCall> {
 public:
  BareCall(std::vector<at::Tensor> weights, const Tensors& inputs, GradientPolicy policy)
      : weights_(policy == GradientPolicy::accumulated ? std::vector<at::Tensor>() : std::move(weights)),
        memory_(at::empty_like(inputs[0].detach())),
        policy_(policy) {
    for (const at::Tensor& input : inputs) {
      copies_.push_back(at::empty_like(input.detach()));
    }
  }

  at::Tensor operator()(const Tensors& inputs) {
    {
      const at::NoGradGuard no_grad;
      for (std::size_t i = 0; i < inputs.size(); ++i) {
        copies_[i].copy_(inputs[i], /*non_blocking=*/true);
      }
    }
    at::Tensor output = over_memory();
    auto node = std::make_shared<Node>(shared_from_this());
    torch::autograd::edge_list edges;
    edges.reserve(inputs.size() + weights_.size());
    for (const at::Tensor& input : inputs) {
      edges.push_back(torch::autograd::impl::gradient_edge(input));
    }
    for (const at::Tensor& weight : weights_) {
      edges.push_back(torch::autograd::impl::gradient_edge(weight));
    }
    node->set_next_edges(std::move(edges));
    torch::autograd::set_history(output, node);
    return output;
  }

 private:
  class Node final : public torch::autograd::Node {
   public:
    explicit Node(std::shared_ptr<BareCall> call) : call_(std::move(call)) {}
    torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
      const at::NoGradGuard no_grad;
      call_->memory_.copy_(grads[0], /*non_blocking=*/true);
      torch::autograd::variable_list results = std::move(grads);
      results.clear();
      results.reserve(num_outputs());
      const bool clones = call_->policy_ == GradientPolicy::cloned;
      for (std::size_t i = 0; i < num_outputs(); ++i) {
        if (i < call_->copies_.size() || clones) {
          results.push_back(at::empty_like(call_->memory_));
          results.back().copy_(call_->memory_, /*non_blocking=*/true);
        } else {
          results.push_back(call_->over_memory());
        }
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

  std::vector<at::Tensor> weights_;
  at::Tensor memory_;
  std::vector<at::Tensor> copies_;
  GradientPolicy policy_;
};

/// Reads all its inputs, and each of its weights once.
class WideModule : public torch::nn::Module {
 public:
  WideModule(std::int64_t weights, c10::Device device) {
    for (std::int64_t i = 0; i < weights; ++i) {
      weights_.push_back(register_parameter("weight" + std::to_string(i), rows(10 + i, device)));
    }
  }
  // NOLINTNEXTLINE(readability-make-member-function-const): a module's forward
  at::Tensor forward(const Tensors& inputs) {
    at::Tensor h = inputs[0];
    for (std::size_t i = 1; i < inputs.size(); ++i) {
      h = h + inputs[i];
    }
    for (const at::Tensor& weight : weights_) {
      h = h * weight;
    }
    return h;
  }
  [[nodiscard]] const std::vector<at::Tensor>& weights() const noexcept { return weights_; }

 private:
  std::vector<at::Tensor> weights_;
};

class Holder : public torch::nn::Module {
 public:
  explicit Holder(std::shared_ptr<WideModule> wide) { register_module("wide", std::move(wide)); }
};

/// How many weights, how many inputs, what becomes of the weights' gradients.
using ReplayWidth = std::tuple<std::int64_t, std::int64_t, GradientPolicy>;

class ReplayPathAllocationTest : public testing::TestWithParam<ReplayWidth> {
 protected:
  struct Taken {
    std::int64_t forward;
    std::int64_t backward;
  };

  ReplayPathAllocationTest() {
    for (std::int64_t i = 0; i < std::get<1>(GetParam()); ++i) {
      inputs_.push_back(rows(200 + i, device_).requires_grad_(true));
    }
  }

  [[nodiscard]] GradientPolicy policy() const { return std::get<2>(GetParam()); }

  template <class Call>
  Taken taken(const Call& call) {
    for (const at::Tensor& weight : wide_->weights()) {
      if (policy() != GradientPolicy::accumulated) {  // which takes operators to attach one anew
        weight.mutable_grad() = at::Tensor();
      }
    }
    const std::int64_t of_device = runtime_->taken();
    const std::int64_t before = heap_allocations();
    at::Tensor y = call(inputs_);
    const std::int64_t of_device_forward = runtime_->taken() - of_device;
    const std::int64_t between = heap_allocations();
    y.backward(seed_);
    const std::int64_t of_device_backward = runtime_->taken() - of_device - of_device_forward;
    return {between - before - of_device_forward, heap_allocations() - between - of_device_backward};
  }
  /// Of the last of some calls: the first ones give the leaves their gradients.
  template <class Call>
  Taken taken_at_last(const Call& call) {
    Taken last{};
    for (int repeat = 0; repeat < 4; ++repeat) {
      last = taken(call);
    }
    return last;
  }
  [[nodiscard]] Taken taken_bare() {
    const auto bare = std::make_shared<BareCall>(wide_->weights(), inputs_, policy());
    return taken_at_last([&](const Tensors& given) { return (*bare)(given); });
  }

  c10::Device device_ = find_device("sim");
  std::shared_ptr<WideModule> wide_ = std::make_shared<WideModule>(std::get<0>(GetParam()), device_);
  Holder model_{wide_};
  std::shared_ptr<CountingRuntime> runtime_ = std::make_shared<CountingRuntime>(make_runtime(device_));
  Tensors inputs_;
  at::Tensor seed_ = rows(4, device_);
};

TEST_P(ReplayPathAllocationTest, AReplayOfACallableTakesWhatABareNodeDoes) {
  OffloadEngine engine = EngineAccess::engine(model_, Options(device_), runtime_);
  const auto body = [](WideModule& wide, const Tensors& in) { return Tensors{wide.forward(in)}; };
  std::vector<Sample> samples(inputs_.begin(), inputs_.end());
  const GraphedCallable graphed = make_graphed_callables(engine, {Callable("call", body, wide_)}, {samples},
                                                         GraphOptions().gradients("**", policy()))[0];
  const Taken replay = taken_at_last([&](const Tensors& given) { return graphed(given)[0]; });
  const Taken least = taken_bare();
  EXPECT_GT(least.forward, 0) << "operator new is not this program's";
  EXPECT_LE(replay.forward, least.forward + 1) << "one vector holds what it returns";
  // Among the blocks that the capture has left free, the simulator's allocator may cut one for the first clone. What is ours is the
  // same for all policies.
  const std::int64_t cut = policy() == GradientPolicy::cloned ? 1 : 0;
  EXPECT_LE(replay.backward, least.backward + cut);
}

TEST_P(ReplayPathAllocationTest, AReplayedCallTakesWhatABareNodeDoes) {
  OffloadEngine engine = EngineAccess::engine(
      model_, Options(device_).graph("wide").graph_options(GraphOptions().gradients("**", policy())), runtime_);
  constexpr int kSteps = 6;
  Taken replay{};
  for (int i = 0; i < kSteps; ++i) {
    const auto step = engine.step();
    replay = taken([&](const Tensors& given) { return call(wide_, given); });
  }
  ASSERT_EQ(engine.report().captures, 2);
  const Taken least = taken_bare();
  EXPECT_LE(replay.forward, least.forward);
  EXPECT_LE(replay.backward, least.backward);
}

std::string name_of_width(const testing::TestParamInfo<ReplayWidth>& info) {
  const auto& [weights, inputs, policy] = info.param;
  const std::string_view gradients = policy == GradientPolicy::cloned  ? "Cloned"
                                     : policy == GradientPolicy::owned ? "Owned"
                                                                       : "Accumulated";
  return std::to_string(weights) + "Weights" + std::to_string(inputs) + "Inputs" + std::string(gradients);
}

INSTANTIATE_TEST_SUITE_P(Widths, ReplayPathAllocationTest,
                         testing::Combine(testing::Values(1, 9, 100), testing::Values(1, 9, 100),
                                          testing::Values(GradientPolicy::cloned, GradientPolicy::owned,
                                                          GradientPolicy::accumulated)),
                         name_of_width);

}  // namespace
}  // namespace sidestream::testing_model
