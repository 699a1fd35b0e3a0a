// Saved tensors that are views of one storage, in several dtypes or forms, composites, and marked tensors: on each path of offload.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

#include "expect_throws.h"
#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "runtime/composite.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
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
  coo,         ///< a sparse tensor
  csr,         ///< a compressed sparse tensor
  nested,
  per_channel,  ///< a quantised tensor
  conjugated,   ///< complex numbers, their conjugate, its adjoint, and its imaginary part, which is negated
};

constexpr c10::ScalarType kIndex = c10::ScalarType::Long;

/// Has no kernels on the simulated device, so it is made and read without operators.
at::Tensor make_coo(const at::Tensor& x) {
  const at::Tensor diagonal = at::arange(kRows, x.options().dtype(kIndex));
  at::Tensor tensor = at::detail::make_tensor<at::SparseTensorImpl>(
      c10::DispatchKeySet(c10::DispatchKey::SparsePrivateUse1), x.dtype());
  auto& impl = *static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
  impl.raw_resize_(2, 1, {kRows, kRows, kColumns});
  impl.set_indices_and_values_unsafe(at::stack({diagonal, diagonal}), x * 2);
  impl.set_coalesced(true);
  return tensor;
}

at::Tensor make_csr(const at::Tensor& x) {
  const at::Tensor indices = at::arange(kNumbers + 1, x.options().dtype(kIndex));
  return at::_sparse_compressed_tensor_unsafe(indices, indices.slice(0, 0, kNumbers).clone(), (x * 2).view({kNumbers}),
                                              {kNumbers, kNumbers}, x.options().layout(at::kSparseCsr));
}

at::Tensor nested_over(const at::Tensor& x) {
  const at::Tensor sizes = at::tensor({std::int64_t{4}, kColumns, kRows - 4, kColumns}, kIndex).view({2, 2});
  return at::detail::make_tensor<at::native::NestedTensorImpl>(x.view({kNumbers}), sizes);
}

at::Tensor make_per_channel(const at::Tensor& x) {
  const at::Tensor scales = x.abs().amax(1).to(at::kDouble) / 127;
  const at::Tensor numbers = (x / scales.unsqueeze(1)).round().to(at::kChar);
  const at::Tensor zero_points = at::arange(kRows, x.options().dtype(kIndex));
  at::Tensor tensor = at::detail::make_tensor<at::QTensorImpl>(
      c10::Storage(numbers.storage()), c10::DispatchKeySet(c10::DispatchKey::QuantizedPrivateUse1),
      caffe2::TypeMeta::Make<c10::qint8>(), at::make_per_channel_affine_quantizer(scales, zero_points, 0, at::kQInt8));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({kRows, kColumns});
  return tensor;
}

/// Numbers that depend on all that `saved` consists of, in the shape of a layer's input.
at::Tensor numbers_of(const at::Tensor& saved) {
  if (saved.is_quantized()) {
    const at::Tensor numbers = split(saved)->parts[0].view(at::kChar).view(saved.sizes()).to(at::kFloat);
    const auto& quantizer = static_cast<const at::PerChannelAffineQuantizer&>(*at::get_qtensorimpl(saved)->quantizer());
    return (numbers * quantizer.scales().unsqueeze(1) + quantizer.zero_points().unsqueeze(1)).to(at::kFloat);
  }
  if (saved.is_nested()) {
    return at::native::get_nested_tensor_impl(saved)->get_buffer().view({kRows, kColumns});
  }
  if (saved.layout() == at::kSparse) {
    const auto& impl = *static_cast<at::SparseTensorImpl*>(saved.unsafeGetTensorImpl());
    EXPECT_TRUE(impl.coalesced());
    return impl.values() + impl.indices().sum() * 1e-3;
  }
  const auto& impl = *static_cast<at::SparseCsrTensorImpl*>(saved.unsafeGetTensorImpl());
  const at::Tensor of_indices = impl.compressed_indices().sum() - impl.plain_indices().select(0, 9) * 7;
  return impl.values().view({kRows, kColumns}) + of_indices * 1e-6;
}

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

Tensors saved_of(const at::Tensor& x, SavedForm saved) {
  switch (saved) {
    case SavedForm::coo:
      return {make_coo(x)};
    case SavedForm::csr:
      return {make_csr(x)};
    case SavedForm::nested:
      return {nested_over(x * 2)};
    case SavedForm::per_channel:
      return {make_per_channel(x)};
    case SavedForm::views: {
      const at::Tensor base = x * 2;
      return {base, base.t(), base.narrow(0, 3, 5), base.narrow(1, 1, 1).expand({kRows, kColumns}),
              base.view(at::kInt)};
    }
    case SavedForm::conjugated: {
      const at::Tensor z = at::view_as_complex((x * 2).view({kRows, kColumns / 2, 2}));
      return {z, z.conj(), z.mH(), at::imag(z.conj())};
    }
    case SavedForm::blocks:
    case SavedForm::one_buffer:
    case SavedForm::marked:
      return quantised(x, saved);
  }
  return {};
}

/// Bytes of the storages that a layer offloads.
std::int64_t offloaded_bytes_of(SavedForm saved) {
  constexpr std::int64_t scales = kRows * 4;
  switch (saved) {
    case SavedForm::coo:
      return kNumbers * 4 + 2 * kRows * 8;
    case SavedForm::csr:
      return kNumbers * 4 + (2 * kNumbers + 1) * 8;
    case SavedForm::nested:
    case SavedForm::views:
    case SavedForm::conjugated:
      return kNumbers * 4;
    case SavedForm::per_channel:
      return kNumbers + 2 * kRows * 8;
    case SavedForm::marked:
      return scales;
    case SavedForm::blocks:
    case SavedForm::one_buffer:
      return kNumbers + scales;
  }
  return 0;
}

/// tanh. What it gives as gradient is computed from all that it saved.
class SavesComposites : public torch::autograd::Function<SavesComposites> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, std::int64_t saved) {
    context->save_for_backward(saved_of(x, static_cast<SavedForm>(saved)));
    return x.tanh();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const torch::autograd::variable_list saved = context->get_saved_variables();
    if (saved.size() == 1) {
      return {gradients[0] * numbers_of(saved[0]), {}};
    }
    if (saved.size() == 2) {
      return {gradients[0] * saved[0].to(at::kFloat) * saved[1], {}};
    }
    if (saved.size() == 4) {
      const at::Tensor z = saved[0] * saved[1] + saved[2].t() + saved[3];
      return {gradients[0] * at::view_as_real(z).view({kRows, kColumns}), {}};
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
  std::int64_t offloaded = 0;
  std::int64_t groups = 0;
  for (const GroupReport& group : engine.report().groups) {
    if (group.name.find("saved") != std::string::npos) {
      EXPECT_EQ(group.bytes, offloaded_bytes_of(saved)) << group.name;
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
  EXPECT_EQ(marked, saved == SavedForm::marked);
}

/// Saves a matrix that was made before, as an operator gives it.
class SavesMatrix : public torch::autograd::Function<SavesMatrix> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor* matrix) {
    context->save_for_backward({matrix->detach()});
    return x.tanh();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0] * numbers_of(context->get_saved_variables()[0]), {}};
  }
};

struct MatrixLayer : torch::nn::Module {
  explicit MatrixLayer(c10::Device device, bool makes = false) : makes_matrix(makes) {
    weight = register_parameter("weight", at::full({kColumns}, 0.9, at::TensorOptions(device)));
    matrix = make_csr(rows(77, device));
    indices = at::arange(kNumbers + 1, at::TensorOptions(device).dtype(kIndex));
    values = register_buffer("values", rows(78, device).view({kNumbers}));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (makes_matrix) {
      matrix = at::_sparse_compressed_tensor_unsafe(indices, indices.slice(0, 0, kNumbers), values,
                                                    {kNumbers, kNumbers}, values.options().layout(at::kSparseCsr));
    }
    OffloadScope scope("saved");
    at::Tensor result = SavesMatrix::apply(x * weight, &matrix);
    scope.end();
    return result;
  }
  bool makes_matrix;
  at::Tensor weight;
  at::Tensor matrix;
  at::Tensor indices;
  at::Tensor values;
};

TEST(CompositeOffload, AGraphMayNotReadASparseTensorFromOutside) {
  const c10::Device device = find_device("sim");
  torch::nn::ModuleList model;
  model->push_back(MatrixLayer(device));
  OffloadEngine engine(*model, Options(device).min_bytes(16).graph("*").offload("**").lag(1));
  const auto train = [&](std::int64_t s) {
    const Step step = engine.step();
    call(&model->at<MatrixLayer>(0), rows(s, device)).mean().backward();
  };
  train(0);
  EXPECT_THROWS(UsageError, "reads a sparse tensor of shape", train(1));
}

TEST(CompositeOffload, AGraphMayMakeASparseTensorFromPlainOnesFromOutside) {
  const c10::Device device = find_device("sim");
  const auto train = [&](bool graphed) {
    torch::nn::ModuleList model;
    model->push_back(MatrixLayer(device, true));
    MatrixLayer& layer = model->at<MatrixLayer>(0);
    std::optional<OffloadEngine> engine;
    if (graphed) {
      engine.emplace(*model, Options(device).min_bytes(16).graph("*").offload("**").lag(1));
    }
    StepTensors gradients;
    for (std::int64_t s = 0; s < 4; ++s) {
      std::optional<Step> step;
      if (graphed) {
        step.emplace(engine->step());
      }
      call(&layer, rows(s, device)).mean().backward();
      step.reset();
      gradients.emplace_back("weight", layer.weight.grad().clone());
      layer.values.mul_(1.5);  // replays read what is there now
    }
    return gradients;
  };
  EXPECT_TRUE(same(train(true), train(false)));
}

TEST(CompositeOffload, AGraphedStepMayNotReadASparseTensorFromOutside) {
  const c10::Device device = find_device("sim");
  torch::nn::ModuleList model;
  model->push_back(MatrixLayer(device));
  OffloadEngine engine(*model, Options(device));
  const Callable step("step", owning([&model](torch::nn::Module&, const Tensors& inputs) {
                        return Tensors{model->at<MatrixLayer>(0).forward(inputs[0]).mean()};
                      }),
                      std::shared_ptr<torch::nn::Module>(std::shared_ptr<void>(), &*model));
  EXPECT_THROWS(UsageError, "reads a sparse tensor of shape",
                (void)make_graphed_step(engine, step, {{rows(0, device)}}));
}

/// tanh, which saves a nested tensor over the memory of its result.
class SavesItsResult : public torch::autograd::Function<SavesItsResult> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    at::Tensor result = x.tanh();
    context->save_for_backward({nested_over(result)});
    return result;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0] * numbers_of(context->get_saved_variables()[0])};
  }
};

TEST(CompositeOffload, AnOutputThatASavedNestedTensorConsistsOfMayNotBeChanged) {
  const c10::Device device = find_device("sim");
  torch::nn::Module model;
  OffloadEngine engine(model, Options(device).min_bytes(16));
  const TensorFunction body = [](const Tensors& in) { return Tensors{SavesItsResult::apply(in[0] * 2)}; };
  const auto input = [&](std::int64_t s) { return rows(s, device).requires_grad_(true); };
  const auto graphed = make_graphed_callables(engine, {Callable("saves", owning(body))}, {{input(0)}});
  for (const bool change : {false, true, false}) {
    const at::Tensor x = input(change ? 1 : 2);
    const at::Tensor y = graphed[0]({x})[0];
    const at::Tensor loss = y.sum();
    if (change) {
      y.detach().mul_(2);
      EXPECT_THROWS(UsageError, "output 0 was changed in place before its backward, which needs it", loss.backward());
      continue;
    }
    loss.backward();
    const at::Tensor x_plain = input(2);
    body({x_plain})[0].sum().backward();
    EXPECT_TRUE(same(values({x.grad()}), values({x_plain.grad()})));
  }
}

TEST(CompositeOffload, ReleaseRefusesASparseTensor) {
  const c10::Device device = find_device("sim");
  MatrixLayer layer(device);
  OffloadEngine engine(layer, Options(device).min_bytes(16).offload("**"));
  const auto step = engine.step();
  OffloadScope scope("outer");
  const at::Tensor y = SavesMatrix::apply(rows(1, device) * layer.weight, &layer.matrix);
  scope.end();
  EXPECT_THROWS(UsageError, "is sparse, nested or quantised", scope.release(layer.matrix));
}

std::string name_of_form(const testing::TestParamInfo<std::tuple<SavedForm, OffloadPath>>& info) {
  const std::vector<std::string> forms{"Blocks", "OneBuffer", "Views",      "Marked",    "Coo",
                                       "Csr",    "Nested",    "PerChannel", "Conjugated"};
  const std::vector<std::string> paths{"Eager", "Delayed", "Graphed", "WholeStep"};
  return forms[static_cast<std::size_t>(std::get<0>(info.param))] +
         paths[static_cast<std::size_t>(std::get<1>(info.param))];
}

INSTANTIATE_TEST_SUITE_P(Paths, CompositeOffloadTest,
                         testing::Combine(testing::Values(SavedForm::blocks, SavedForm::one_buffer, SavedForm::views,
                                                          SavedForm::marked, SavedForm::coo, SavedForm::csr,
                                                          SavedForm::nested, SavedForm::per_channel,
                                                          SavedForm::conjugated),
                                          testing::Values(OffloadPath::eager, OffloadPath::delayed,
                                                          OffloadPath::graphed, OffloadPath::whole_step)),
                         name_of_form);

}  // namespace
}  // namespace sidestream::testing_model
