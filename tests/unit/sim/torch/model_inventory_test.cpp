#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include <algorithm>
#include <iterator>
#include <sstream>
#include <string>

#include "model_of_real_parts.h"
#include "operator_cases.h"

namespace {

using Names = std::vector<std::string>;

thread_local Names* saved = nullptr;

/// Writes down what autograd saves and keeps it.
struct Listing final : torch::autograd::SavedVariableHooks {
  void call_pack_hook(const at::Tensor& tensor) override {
    kept = tensor.detach();
    std::ostringstream line;
    line << tensor.scalar_type() << tensor.sizes() << (tensor.is_contiguous() ? "" : " strided");
    saved->push_back(line.str());
  }
  at::Tensor call_unpack_hook() override { return kept; }
  at::Tensor kept;
};

struct ListingEngine final : torch::autograd::Engine {
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return saved != nullptr ? std::make_unique<Listing>() : nullptr;
  }
  static torch::autograd::Engine& get() {
    static auto* const engine = new ListingEngine();
    return *engine;
  }
};

/// What one block runs and saves on one device: operators that have a tensor of that device as input, in order of issue.
struct Inventory {
  Names forward, backward, saved_tensors;
};

Names* operators = nullptr;
c10::DeviceType watched = c10::kCPU;

std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& call) {
  const auto inputs = call.inputs();
  const auto on_device = [](const c10::IValue& value) {
    return value.isTensor() && value.toTensor().defined() && value.toTensor().device().type() == watched;
  };
  if (std::any_of(inputs.begin(), inputs.end(), on_device)) {
    operators->push_back(call.name());
  }
  return nullptr;
}

Inventory take_inventory(c10::Device device) {
  at::manual_seed(1);
  sidestream::test::Block block(sidestream::test::ModelShape{});
  block->to(device);
  const at::Tensor x = sidestream::test::parameter({2, 8, 32}, device);
  Inventory inventory;
  watched = device.type();
  operators = &inventory.forward;
  torch::autograd::set_default_engine_stub(&ListingEngine::get);
  const auto observer =
      at::addGlobalCallback(at::RecordFunctionCallback(&note).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  saved = &inventory.saved_tensors;
  at::manual_seed(2);
  const at::Tensor loss = block->forward(x).square().sum();
  saved = nullptr;
  // Only one engine of a process gets device threads: this one never runs a backward.
  torch::autograd::set_default_engine_stub(&torch::autograd::Engine::get_base_engine);
  operators = &inventory.backward;
  loss.backward();
  at::removeCallback(observer);
  return inventory;
}

/// Each name once.
Names kinds(Names names) {
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

/// The names in `a` that are not in `b`, each once for each time it is missing.
Names only_in(Names a, Names b) {
  std::sort(a.begin(), a.end());
  std::sort(b.begin(), b.end());
  Names result;
  std::set_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(result));
  return result;
}

bool contains(const Names& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

TEST(ModelInventory, OperatorsDifferFromTheCpuOnlyWhereTheCpuTakesPathsOfItsOwn) {
  const Inventory sim = take_inventory(sidestream::test::sim()), cpu = take_inventory(at::kCPU);
  EXPECT_TRUE(contains(sim.forward, "aten::_scaled_dot_product_fused_attention_overrideable"));
  EXPECT_TRUE(contains(sim.forward, "aten::native_dropout"));
  EXPECT_TRUE(contains(sim.forward, "aten::native_layer_norm"));
  EXPECT_FALSE(contains(sim.forward, "aten::native_batch_norm"));
  EXPECT_FALSE(contains(sim.forward, "aten::_scaled_dot_product_attention_math"));
  EXPECT_EQ(only_in(kinds(sim.forward), kinds(cpu.forward)),
            (Names{"aten::_scaled_dot_product_fused_attention_overrideable", "aten::native_dropout"}));
  // An assignment of one dtype is copy_ on the CPU and crosses to _copy_from on every other device of LibTorch's interface.
  EXPECT_EQ(only_in(kinds(sim.backward), kinds(cpu.backward)),
            (Names{"aten::_copy_from", "aten::_scaled_dot_product_fused_attention_overrideable_backward",
                   "aten::native_dropout_backward"}));
}

TEST(ModelInventory, SavedTensorsDifferFromTheCpuOnlyInDropoutMasksAndTheSeedsOfAttention) {
  const Inventory sim = take_inventory(sidestream::test::sim()), cpu = take_inventory(at::kCPU);
  EXPECT_EQ(only_in(cpu.saved_tensors, sim.saved_tensors), (Names{"Float[2, 8, 32]", "Float[2, 8, 32]"}));
  EXPECT_EQ(only_in(sim.saved_tensors, cpu.saved_tensors),
            (Names{"Bool[2, 8, 32]", "Bool[2, 8, 32]", "Long[0]", "Long[0]", "Long[0]", "Long[0]"}));
}

}  // namespace
