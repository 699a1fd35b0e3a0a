// Saved tensors that are views of one storage, in several dtypes or forms, and marked tensors: on each path of offload.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_step.h"
#include "sidestream/owning.h"
#include "sidestream/scope.h"

namespace sidestream::testing_model {
namespace {

constexpr std::int64_t kRows = 16;
constexpr std::int64_t kColumns = kHidden;
constexpr std::int64_t kNumbers = kRows * kColumns;

/// What a layer saves.
enum class SavedForm : std::uint8_t {
  blocks,      ///< numbers of one byte, and a scale for each row, in two storages
  one_buffer,  ///< the same in one storage
  views,       ///< one storage as it is, transposed, with an offset, expanded, and as other numbers
  marked,      ///< as `blocks`; the numbers are marked to stay
};

Tensors quantised(const at::Tensor& x, SavedForm saved) {
  const at::Tensor scale = x.abs().amax(1, /*keepdim=*/true) / 127;
  const at::Tensor numbers = (x / scale).round();
  const auto bytes = x.options().dtype(at::kByte);
  if (saved != SavedForm::one_buffer) {
    const at::Tensor small = numbers.to(at::kChar);
    if (saved == SavedForm::marked) {
      mark_not_offload(small);
    }
    return {small, scale};
  }
  const at::Tensor buffer = at::empty({kNumbers + kRows * 4}, bytes);
  const at::Tensor small = buffer.narrow(0, 0, kNumbers).view(at::kChar).view({kRows, kColumns});
  const at::Tensor scales = buffer.narrow(0, kNumbers, kRows * 4).view(at::kFloat).view({kRows, 1});
  small.copy_(numbers);
  scales.copy_(scale);
  return {small, scales};
}

/// tanh. What it gives as gradient is computed from all that it saved.
class SavesComposites : public torch::autograd::Function<SavesComposites> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, std::int64_t saved) {
    if (static_cast<SavedForm>(saved) == SavedForm::views) {
      const at::Tensor base = x * 2;
      context->save_for_backward(
          {base, base.t(), base.narrow(0, 3, 5), base.narrow(1, 1, 1).expand({kRows, kColumns}), base.view(at::kInt)});
    } else {
      context->save_for_backward(quantised(x, static_cast<SavedForm>(saved)));
    }
    return x.tanh();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const torch::autograd::variable_list saved = context->get_saved_variables();
    if (saved.size() == 2) {
      return {gradients[0] * saved[0].to(at::kFloat) * saved[1], {}};
    }
    const at::Tensor rows = at::pad(saved[2], {0, 0, 3, kRows - 8});
    return {gradients[0] * (saved[0] + saved[1].t() + rows + saved[3] + saved[4].view(at::kFloat)), {}};
  }
};

struct CompositeLayer : torch::nn::Module {
  explicit CompositeLayer(SavedForm saved) : saved(saved) {
    weight = register_parameter("weight", at::full({kColumns}, 0.9));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = x * weight;
    OffloadScope scope("saved");
    const at::Tensor result = SavesComposites::apply(h, static_cast<std::int64_t>(saved));
    scope.end();
    return result;
  }
  SavedForm saved;
  at::Tensor weight;
};

struct CompositeStack : torch::nn::Module {
  static constexpr std::int64_t kLayers = 5;
  CompositeStack(SavedForm saved, c10::Device device) {
    for (std::int64_t i = 0; i < kLayers; ++i) {
      layers->push_back(CompositeLayer(saved));
    }
    register_module("layers", layers);
    to(device);
  }
  at::Tensor loss(at::Tensor h) {
    for (std::size_t i = 0; i < layers->size(); ++i) {
      h = call(&layers->at<CompositeLayer>(i), h);
    }
    return h.mean();
  }
  torch::nn::ModuleList layers;
};

enum class OffloadPath : std::uint8_t { eager, delayed, graphed, whole_step };

class CompositeOffloadTest : public testing::TestWithParam<std::tuple<SavedForm, OffloadPath>> {};

TEST_P(CompositeOffloadTest, IsPlainTrainingAndEachStorageMovesOnce) {
  const auto& [saved, path] = GetParam();
  const c10::Device device = find_device("sim");
  CompositeStack model(saved, device);
  CompositeStack plain(saved, device);
  Options options = Options(device).min_bytes(16).offload("layers.*.saved").lag(1);
  if (path == OffloadPath::graphed) {
    options.graph("layers.*");
  } else if (path == OffloadPath::delayed) {
    options.graph("layers.{1,3}").delay("layers.{0,2,4}.saved");
  }
  OffloadEngine engine(model, options);
  const auto input = [&](std::int64_t s) { return rows(s, device); };
  std::optional<GraphedStep> whole;
  if (path == OffloadPath::whole_step) {
    const Callable step(
        "step", owning([&model](torch::nn::Module&, const Tensors& inputs) { return Tensors{model.loss(inputs[0])}; }),
        std::shared_ptr<torch::nn::Module>(std::shared_ptr<void>(), &model));
    whole.emplace(make_graphed_step(engine, step, {{input(900)}}, StepOptions().offload(true)));
  }
  for (std::int64_t s = 0; s < 4; ++s) {
    expect_same_step(model, &engine, plain, s, [&](CompositeStack& stack) {
      if (&stack == &model && whole) {
        (void)(*whole)({{input(s)}});
      } else {
        stack.loss(input(s)).backward();
      }
    });
  }
  const std::int64_t scales = kRows * 4;
  const std::int64_t bytes = saved == SavedForm::views    ? kNumbers * 4
                             : saved == SavedForm::marked ? scales
                                                          : kNumbers + scales;
  std::int64_t offloaded = 0;
  std::int64_t groups = 0;
  for (const GroupReport& group : engine.report().groups) {
    if (group.name.find("saved") != std::string::npos) {
      EXPECT_EQ(group.bytes, bytes) << group.name;
      offloaded += group.offloaded_bytes;
      ++groups;
    }
  }
  EXPECT_EQ(groups, CompositeStack::kLayers);
  EXPECT_GT(offloaded, 0);
  EXPECT_EQ(engine.report().offloaded_bytes, offloaded);
  EXPECT_GT(engine.report().reloaded_bytes, 0);
  EXPECT_LE(engine.report().reloaded_bytes, offloaded) << "a backward may come before the copy has taken its memory";
  EXPECT_EQ(engine.report().copied_twice_bytes, 0);
  bool marked = false;
  for (const ExclusionReport& exclusion : engine.report().exclusions) {
    marked = marked || exclusion.reason.find("marked") != std::string::npos;
  }
  // A replayed step saves nothing that could be counted.
  EXPECT_EQ(marked, saved == SavedForm::marked && path != OffloadPath::whole_step);
}

std::string name_of_form(const testing::TestParamInfo<std::tuple<SavedForm, OffloadPath>>& info) {
  const std::vector<std::string> forms{"Blocks", "OneBuffer", "Views", "Marked"};
  const std::vector<std::string> paths{"Eager", "Delayed", "Graphed", "WholeStep"};
  return forms[static_cast<std::size_t>(std::get<0>(info.param))] +
         paths[static_cast<std::size_t>(std::get<1>(info.param))];
}

INSTANTIATE_TEST_SUITE_P(Paths, CompositeOffloadTest,
                         testing::Combine(testing::Values(SavedForm::blocks, SavedForm::one_buffer, SavedForm::views,
                                                          SavedForm::marked),
                                          testing::Values(OffloadPath::eager, OffloadPath::delayed,
                                                          OffloadPath::graphed, OffloadPath::whole_step)),
                         name_of_form);

}  // namespace
}  // namespace sidestream::testing_model
