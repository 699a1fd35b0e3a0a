#include "graphs/gradients/backward_split.h"

#include <cstdint>
#include <functional>
#include <map>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include "models/plain_twin.h"

namespace sidestream::testing_model {
namespace {

/// A body, the leaves that it is given and those that it reads.
struct Body {
  std::string name;
  std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& weights)>
      run;
  std::vector<std::vector<std::int64_t>> inputs;   ///< shapes
  std::vector<std::vector<std::int64_t>> weights;  ///< likewise
  std::size_t in_second = 0;                       ///< how many weights' gradients the second part computes
  bool input_gradients = true;
};

std::ostream& operator<<(std::ostream& out, const Body& body) { return out << body.name; }

/// Computes both gradients whatever is asked for.
class Scaled : public torch::autograd::Function<Scaled> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x, w});
    return x * w;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    const auto saved = context->get_saved_variables();
    return {grads[0] * saved[1], grads[0] * saved[0]};
  }
};

std::vector<Body> bodies() {
  using T = std::vector<at::Tensor>;
  return {
      {"linear", [](const T& x, const T& w) { return T{at::linear(x[0], w[0], w[1])}; }, {{4, 8}}, {{6, 8}, {6}}, 2},
      {"two_linears",
       [](const T& x, const T& w) { return T{at::linear(at::gelu(at::linear(x[0], w[0], w[1])), w[2])}; },
       {{4, 8}},
       {{6, 8}, {6}, {8, 6}},
       3},
      {"norm",
       [](const T& x, const T& w) { return T{at::layer_norm(x[0], {8}, w[0], w[1]).sin()}; },
       {{4, 8}},
       {{8}, {8}},
       2},
      {"product", [](const T& x, const T& w) { return T{(x[0] * w[0] + w[1]).tanh()}; }, {{4, 8}}, {{8}, {4, 8}}, 2},
      {"convolution",
       [](const T& x, const T& w) { return T{at::conv2d(x[0], w[0], w[1]).relu()}; },
       {{2, 3, 6, 6}},
       {{4, 3, 3, 3}, {4}},
       2},
      {"made_weight",  // nodes between the leaf and the node where it joins
       [](const T& x, const T& w) { return T{at::linear(x[0], w[0] / w[0].norm() * w[1])}; },
       {{4, 8}},
       {{6, 8}, {6, 1}},
       2},
      {"used_twice",
       [](const T& x, const T& w) { return T{at::linear(at::linear(x[0], w[0]).tanh(), w[0]) + w[1]}; },
       {{4, 8}},
       {{8, 8}, {8}},
       1},
      {"custom",
       [](const T& x, const T& w) { return T{at::linear(Scaled::apply(x[0], w[0]), w[1])}; },
       {{4, 8}},
       {{4, 8}, {6, 8}},
       1},
      {"joint_kernel",  // of a node that LibTorch generates
       [](const T& x, const T& w) { return T{at::prelu(at::linear(x[0], w[0]), w[1])}; },
       {{4, 8}},
       {{6, 8}, {6}},
       1},
      {"no_input_gradient",
       [](const T& x, const T& w) { return T{at::linear(at::linear(x[0], w[0]).tanh(), w[1])}; },
       {{4, 8}},
       {{8, 8}, {6, 8}},
       2,
       /*input_gradients=*/false},
      {"two_outputs",
       [](const T& x, const T& w) {
         const at::Tensor h = at::linear(x[0], w[0]);
         return T{h.sin(), at::linear(h, w[1])};
       },
       {{4, 8}},
       {{8, 8}, {6, 8}},
       2},
      {"an_output_of_weights_alone",
       [](const T& x, const T& w) {
         return T{at::linear(x[0], w[0]), w[1] * 2};
       },
       {{4, 8}},
       {{8, 8}, {6, 8}},
       2},
      {"hook_on_an_output",
       [](const T& x, const T& w) {
         const at::Tensor y = at::linear(x[0], w[0]);
         y.register_hook([](const at::Tensor& grad) { return grad * 2; });
         return T{y};
       },
       {{4, 8}},
       {{6, 8}},
       0,
       /*input_gradients=*/false},
      {"hook_inside",
       [](const T& x, const T& w) {
         const at::Tensor h = at::linear(x[0], w[0]);
         h.register_hook([](const at::Tensor& grad) { return grad * 2; });
         return T{at::linear(h, w[1])};
       },
       {{4, 8}},
       {{8, 8}, {6, 8}},
       1},
      {"in_place",
       [](const T& x, const T& w) { return T{at::linear(x[0], w[0]).mul_(w[1]).add_(w[2])}; },
       {{4, 8}},
       {{8, 8}, {8}, {8}},
       3},
  };
}

std::vector<at::Tensor> leaves(const std::vector<std::vector<std::int64_t>>& shapes, bool gradients, int salt) {
  std::vector<at::Tensor> all;
  for (const auto& shape : shapes) {
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(++salt));
    all.push_back(at::randn(shape, generator).requires_grad_(gradients));
  }
  return all;
}

torch::autograd::edge_list edges_of(const std::vector<at::Tensor>& tensors) {
  torch::autograd::edge_list edges;
  for (const at::Tensor& tensor : tensors) {
    edges.push_back(torch::autograd::impl::gradient_edge(tensor));
  }
  return edges;
}

/// Counts operators of this thread by name while it lives.
class OperatorCount {
 public:
  OperatorCount()
      : handle_(at::addThreadLocalCallback(
            at::RecordFunctionCallback([](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
              ++counts()[function.name()];
              return nullptr;
            }).scopes({at::RecordScope::FUNCTION}))) {
    counts().clear();
  }
  OperatorCount(const OperatorCount&) = delete;
  OperatorCount& operator=(const OperatorCount&) = delete;
  ~OperatorCount() { at::removeCallback(handle_); }
  static std::map<std::string, int>& counts() {
    static thread_local std::map<std::string, int> all;
    return all;
  }

 private:
  at::CallbackHandle handle_;
};

class BackwardSplitTest : public testing::TestWithParam<Body> {};

TEST_P(BackwardSplitTest, BothPartsGiveTheGradientsOfOneBackward) {
  const Body& body = GetParam();
  const std::vector<at::Tensor> inputs = leaves(body.inputs, body.input_gradients, 0);
  const std::vector<at::Tensor> weights = leaves(body.weights, true, 50);
  std::vector<at::Tensor> first = body.input_gradients ? inputs : std::vector<at::Tensor>();
  std::vector<at::Tensor> all = first;
  all.insert(all.end(), weights.begin(), weights.end());
  std::vector<at::Tensor> seeds;
  std::vector<at::Tensor> outputs = body.run(inputs, weights);
  for (const at::Tensor& output : outputs) {
    seeds.push_back(leaves({output.sizes().vec()}, false, 90).front());
  }
  std::map<std::string, int> whole_count;
  std::vector<at::Tensor> whole;
  {
    const OperatorCount count;
    whole = torch::autograd::grad(outputs, all, seeds);
    whole_count = OperatorCount::counts();
  }
  outputs = body.run(inputs, weights);
  BackwardSplit split(edges_of(outputs), first, weights);
  outputs.clear();
  std::map<std::string, int> first_count;
  std::map<std::string, int> second_count;
  std::vector<at::Tensor> made;
  std::vector<at::Tensor> late;
  {
    const OperatorCount count;
    made = split.run_first(seeds);
    first_count = std::exchange(OperatorCount::counts(), {});
    late = split.run_second();
    second_count = OperatorCount::counts();
  }
  std::size_t in_second = 0;
  for (std::size_t i = 0; i < all.size(); ++i) {
    const std::size_t w = i - first.size();
    const bool second = i >= first.size() && split.in_second(w);
    in_second += second ? 1 : 0;
    EXPECT_EQ(made[i].defined(), !second);
    EXPECT_TRUE(at::equal(second ? late[w] : made[i], whole[i])) << "gradient " << i;
  }
  EXPECT_EQ(in_second, body.in_second);
  for (const char* const product :
       {"aten::mm", "aten::mul", "aten::addmm", "aten::tanh_backward", "aten::sin", "aten::_prelu_kernel_backward"}) {
    EXPECT_LE(first_count[product] + second_count[product], whole_count[product]) << product;  // none is computed twice
  }
}

INSTANTIATE_TEST_SUITE_P(Bodies, BackwardSplitTest, testing::ValuesIn(bodies()),
                         [](const auto& info) { return info.param.name; });

TEST(AccumulateGradientsTest, RunsHooksInABackwardOfItsOwn) {
  const std::vector<at::Tensor> weights = leaves({{3}, {2}}, true, 0);
  const std::vector<at::Tensor> grads = leaves({{3}, {2}}, false, 10);
  std::int64_t in_pass = 0;
  weights[0].register_hook([&](const at::Tensor& grad) {
    in_pass += torch::autograd::get_current_graph_task_id() >= 0 ? 1 : 0;
    return grad * 2;
  });
  accumulate({weights, {grads[0].clone(), grads[1].clone()}});
  accumulate({weights, {grads[0].clone(), grads[1].clone()}});
  EXPECT_EQ(in_pass, 2);
  EXPECT_TRUE(at::equal(weights[0].grad(), grads[0] * 4));
  EXPECT_TRUE(at::equal(weights[1].grad(), grads[1] * 2));
}

TEST(AccumulateGradientsTest, HandsTheGradientOnWithoutACopy) {
  const std::vector<at::Tensor> weights = leaves({{3}}, true, 0);
  at::Tensor grad = leaves({{3}}, false, 10).front();
  const void* const memory = grad.const_data_ptr();
  std::vector<at::Tensor> grads;
  grads.push_back(std::move(grad));
  accumulate({weights, std::move(grads)});
  EXPECT_EQ(weights[0].grad().const_data_ptr(), memory);
}

}  // namespace
}  // namespace sidestream::testing_model
