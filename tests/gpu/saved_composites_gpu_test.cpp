// Sparse, nested and quantised tensors that LibTorch's operators save on a GPU, offloaded and reloaded.
#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>

#include "gpu/gpu_fixture.h"
#include "models/plain_twin.h"
#include "sidestream/engine.h"
#include "sidestream/scope.h"

namespace sidestream::testing_model {
namespace {

constexpr std::int64_t kSize = 1024;

/// Saves x quantised per channel.
class SavesPerChannel : public torch::autograd::Function<SavesPerChannel> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    const at::Tensor scales = at::full({kSize}, 0.5, x.options().dtype(at::kDouble));
    const at::Tensor zero_points = at::arange(kSize, x.options().dtype(at::kLong)).remainder(3);
    context->save_for_backward({at::quantize_per_channel(x, scales, zero_points, 0, at::kQInt8)});
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0] * context->get_saved_variables()[0].dequantize()};
  }
};

struct Saving {
  std::string name;
  std::function<at::Tensor(const at::Tensor& x, const at::Tensor& weight)> run;
};

/// x and weight hold small whole numbers, so that sums are exact in any order.
std::vector<Saving> savings() {
  using At = const at::Tensor&;
  return {
      {"coo", [](At x, At weight) { return at::_sparse_mm(at::relu(x).to_sparse(), weight); }},
      {"csr", [](At x, At weight) { return at::mm(at::relu(x).to_sparse_csr(), weight); }},
      {"nested",
       [](At x, At weight) {
         const at::Tensor nested = at::_nested_tensor_from_tensor_list({x.slice(0, 0, 300), x.slice(0, 300)});
         return at::linear(nested, weight).to_padded_tensor(0);
       }},
      {"per_channel", [](At x, At weight) { return SavesPerChannel::apply(x + weight); }},
  };
}

void PrintTo(const Saving& saving, std::ostream* out) { *out << saving.name; }

struct OneWeight : torch::nn::Module {
  explicit OneWeight(const at::TensorOptions& options) {
    at::manual_seed(1);
    weight = register_parameter("weight", at::randint(-2, 3, {kSize, kSize}, options));
  }
  at::Tensor weight;
};

class GpuSavedCompositesTest : public gpu::Gpu, public testing::WithParamInterface<Saving> {};

TEST_P(GpuSavedCompositesTest, GradientsEqualPlainTraining) {
  OneWeight model(options()), plain(options());
  OffloadEngine engine(model, Options(tested_gpu()).min_bytes(1024).offload("**").lag(1));
  for (std::int64_t s = 0; s < 3; ++s) {
    at::manual_seed(static_cast<std::uint64_t>(s) + 7);
    const at::Tensor x = at::randint(-2, 3, {kSize, kSize}, options());
    const auto gradient = [&](OneWeight& of, OffloadEngine* in) {
      clear_gradients(of);
      in_step(in, [&] {
        at::Tensor y;
        {
          OffloadScope scope("saving");
          y = GetParam().run(x.clone(), of.weight);
          scope.end();
        }
        at::Tensor later = x * of.weight;  // the last group of a step stays
        for (int i = 0; i < 3; ++i) {
          OffloadScope scope("later");
          later = later * of.weight;
          scope.end();
        }
        (y.sum() + later.sum() * 0).backward();
      });
      return gradients(of);
    };
    const StepTensors expected = gradient(plain, nullptr);
    EXPECT_TRUE(same(gradient(model, &engine), expected)) << "step " << s;
  }
  std::int64_t offloaded = 0;
  for (const GroupReport& group : engine.report().groups) {
    offloaded += group.name == "saving" ? group.offloaded_bytes : 0;
  }
  EXPECT_GE(offloaded, kSize * kSize);
  for (const ExclusionReport& exclusion : engine.report().exclusions) {
    EXPECT_NE(exclusion.reason, "unsupported");
  }
}

INSTANTIATE_TEST_SUITE_P(Savings, GpuSavedCompositesTest, testing::ValuesIn(savings()),
                         [](const testing::TestParamInfo<Saving>& info) { return info.param.name; });

}  // namespace
}  // namespace sidestream::testing_model
