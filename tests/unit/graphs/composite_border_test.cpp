// Sparse and nested tensors where a graph would have to take or give them.
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

#include "expect_throws.h"
#include "models/layer_stack.h"
#include "runtime/composite.h"
#include "sidestream/bucketed_callables.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/graphed_step.h"
#include "sidestream/owning.h"
#include "warnings.h"

namespace sidestream::testing_model {
namespace {

enum class BorderForm : std::uint8_t { coo, csr, nested };

/// Over numbers of `x`, [16, kHidden]. Few composites have kernels on the simulated device, so they are made and read without operators.
at::Tensor composite_over(const at::Tensor& x, BorderForm form) {
  const at::Tensor numbers = x.detach().clone().view({-1});
  const at::Tensor indices = at::arange(numbers.numel() + 1, x.options().dtype(at::kLong).requires_grad(false));
  switch (form) {
    case BorderForm::coo: {
      at::Tensor tensor = at::detail::make_tensor<at::SparseTensorImpl>(
          c10::DispatchKeySet(c10::DispatchKey::SparsePrivateUse1), x.dtype());
      auto& impl = *static_cast<at::SparseTensorImpl*>(tensor.unsafeGetTensorImpl());
      impl.raw_resize_(1, 0, {numbers.numel()});
      impl.set_indices_and_values_unsafe(indices.slice(0, 0, numbers.numel()).view({1, -1}), numbers);
      impl.set_coalesced(true);
      return tensor;
    }
    case BorderForm::csr:
      return at::_sparse_compressed_tensor_unsafe(indices, indices.slice(0, 0, numbers.numel()).clone(), numbers,
                                                  {numbers.numel(), numbers.numel()},
                                                  numbers.options().layout(at::kSparseCsr));
    case BorderForm::nested:
      return at::detail::make_tensor<at::native::NestedTensorImpl>(
          numbers, at::tensor({std::int64_t{4}, kHidden, std::int64_t{12}, kHidden}, at::kLong).view({2, 2}));
  }
  return {};
}

/// The sum of the numbers of a tensor, whatever it consists of.
at::Tensor total_of(const at::Tensor& tensor) {
  at::Tensor total;
  for_each_part(tensor, [&](const at::Tensor& part) {
    const at::Tensor numbers = part.scalar_type() == at::kByte ? part.view(at::kFloat) : part;
    if (numbers.is_floating_point()) {
      total = numbers.sum();
    }
  });
  return total;
}

struct TakesMatrix : torch::nn::Module {
  explicit TakesMatrix(c10::Device device) {
    weight = register_parameter("weight", at::full({kHidden}, 0.9, at::TensorOptions(device)));
  }
  at::Tensor forward(const at::Tensor& x, const at::Tensor& matrix) { return x * weight * total_of(matrix); }
  at::Tensor weight;
};

struct GivesMatrix : torch::nn::Module {
  GivesMatrix(BorderForm form, c10::Device device) : form(form) {
    weight = register_parameter("weight", at::full({kHidden}, 0.9, at::TensorOptions(device)));
  }
  at::Tensor forward(const at::Tensor& x) { return composite_over(x * weight, form); }
  BorderForm form;
  at::Tensor weight;
};

class CompositeBorderTest : public testing::TestWithParam<BorderForm> {
 protected:
  CompositeBorderTest() { model_->push_back(TakesMatrix(device_)); }

  [[nodiscard]] at::Tensor composite(std::int64_t s) const { return composite_over(rows(s, device_), GetParam()); }
  /// The gradient of the weight.
  at::Tensor train(std::int64_t s, const at::Tensor& matrix) {
    auto& layer = model_->at<TakesMatrix>(0);
    layer.weight.mutable_grad() = at::Tensor();
    call(&layer, rows(s, device_), matrix).mean().backward();
    return layer.weight.grad().clone();
  }
  at::Tensor train(OffloadEngine& engine, std::int64_t s, const at::Tensor& matrix) {
    const auto step = engine.step();
    return train(s, matrix);
  }

  c10::Device device_ = find_device("sim");
  torch::nn::ModuleList model_;
  Callable callable_{"takes", owning([](const Tensors& in) { return Tensors{in[0] * total_of(in[1])}; })};
};

TEST_P(CompositeBorderTest, AnArgumentOfAGraphedCallIsRefused) {
  OffloadEngine engine(*model_, Options(device_).min_bytes(16).graph("*"));
  const at::Tensor plain = rows(9, device_);
  for (std::int64_t s = 0; s < 8; s += 2) {  // before the call is recorded, captured and replayed
    EXPECT_THROWS(UsageError, "graphed call \"0\": input 1 is a ", (void)train(engine, s, composite(s)));
    const at::Tensor gradient = train(engine, s + 1, plain);
    EXPECT_TRUE(at::equal(gradient, train(s + 1, plain))) << s;
  }
  EXPECT_GT(engine.report().replays, 0);
}

TEST_P(CompositeBorderTest, AnEagerEngineTakesIt) {
  OffloadEngine engine(*model_, Options(device_).min_bytes(16).offload("**"));
  for (std::int64_t s = 0; s < 3; ++s) {
    const at::Tensor gradient = train(engine, s, composite(s));
    EXPECT_TRUE(at::equal(gradient, train(s, composite(s)))) << s;
  }
}

TEST_P(CompositeBorderTest, ACallWithoutRoomForACaptureTakesIt) {
  OffloadEngine engine(*model_, Options(device_).min_bytes(16).graph("*").call_options(
                                    CallOptions().max_captures(1).on_max_captures(OnMaxCaptures::eager)));
  const at::Tensor dense = rows(9, device_);
  for (std::int64_t s = 0; s < 3; ++s) {
    (void)train(engine, s, dense);
  }
  const at::Tensor matrix = composite(7);
  const ExpectedWarnings warnings;  // that it runs eagerly
  const at::Tensor mine = train(engine, 3, matrix);
  EXPECT_TRUE(at::equal(mine.cpu(), train(3, matrix).cpu()));
}

TEST_P(CompositeBorderTest, ASampleIsRefused) {
  OffloadEngine engine(*model_, Options(device_));
  const at::Tensor x = rows(0, device_);
  EXPECT_THROWS(UsageError, "graphed call \"takes\": input 1 is a ",
                (void)make_graphed_callables(engine, {callable_}, {{x, composite(0)}}));
  EXPECT_THROWS(UsageError, "graphed call \"takes\": input 1 is a ",
                (void)make_bucketed_callables(engine, {callable_}, {{{x, x}}, {{x, composite(0)}}}));
  EXPECT_THROWS(UsageError, "graphed step \"takes\": input 1 is a ",
                (void)make_graphed_step(engine, callable_, {{x, composite(0)}}));
}

TEST_P(CompositeBorderTest, AnInputOfACallableOrAStepIsRefused) {
  OffloadEngine engine(*model_, Options(device_));
  const at::Tensor x = rows(0, device_);
  const auto expect_refusal = [&](const auto& graphed, const std::string& text) {
    EXPECT_THROWS(UsageError, text, (void)graphed(composite(0)));
    EXPECT_NO_THROW((void)graphed(rows(1, device_)));
  };
  const GraphedCallable callable = make_graphed_callables(engine, {callable_}, {{x, x}})[0];
  expect_refusal([&](const at::Tensor& matrix) { return callable({x, matrix}); }, "\"takes\": input 1 is a ");
  const GraphedCallable bucketed = make_bucketed_callables(engine, {callable_}, {{{x, x}}})[0];
  const ExpectedWarnings warnings;
  const at::Tensor matrix = composite(0);
  EXPECT_TRUE(at::equal(bucketed({x, matrix})[0], x * total_of(matrix))) << "it fits no bucket, so it runs eagerly";
  const Callable step("step", owning([this](torch::nn::Module&, const Tensors& in) {
                        return Tensors{model_->at<TakesMatrix>(0).forward(in[0], in[1]).mean()};
                      }),
                      std::shared_ptr<torch::nn::Module>(std::shared_ptr<void>(), &*model_));
  const GraphedStep whole = make_graphed_step(engine, step, {{x, x}});
  expect_refusal([&](const at::Tensor& matrix) { return whole({{x, matrix}}); }, "\"step\": input 1 is a ");
}

TEST_P(CompositeBorderTest, AnOutputIsRefused) {
  torch::nn::ModuleList model;
  model->push_back(GivesMatrix(GetParam(), device_));
  auto& layer = model->at<GivesMatrix>(0);
  const at::Tensor x = rows(0, device_);
  OffloadEngine eager(*model, Options(device_).min_bytes(16).offload("**"));
  OffloadEngine engine(*model, Options(device_).min_bytes(16).graph("*"));
  for (OffloadEngine* const of : {&eager, &engine, &engine}) {
    const auto step = of->step();
    if (of == &engine) {
      EXPECT_THROWS(CaptureError, "graphed call \"0\": output 0 is a ", (void)call(&layer, x));
    } else {
      EXPECT_TRUE(at::equal(total_of(call(&layer, x)), total_of(layer.forward(x))));
    }
  }
  const Callable gives("gives", owning([form = GetParam()](const Tensors& in) {
                         return Tensors{in[0] * 2, composite_over(in[0], form)};
                       }));
  EXPECT_THROWS(CaptureError, "graphed call \"gives\": output 1 is a ",
                (void)make_graphed_callables(engine, {gives}, {{x}}));
}

/// A parameter or buffer.
TEST_P(CompositeBorderTest, AMemberOfTheModelIsRefusedIfItIsNested) {
  auto& layer = model_->at<TakesMatrix>(0);
  layer.register_buffer("matrix", composite(3));
  const at::Tensor plain = rows(9, device_);
  OffloadEngine eager(*model_, Options(device_).min_bytes(16).offload("**"));
  OffloadEngine engine(*model_, Options(device_).min_bytes(16).graph("*"));
  const bool refused = GetParam() == BorderForm::nested;
  for (std::int64_t s = 0; s < 3; ++s) {
    const at::Tensor expected = train(s, plain);
    EXPECT_TRUE(at::equal(train(eager, s, plain), expected)) << s;
    if (refused) {
      EXPECT_THROWS(UsageError, "graphed call \"0\": \"matrix\" is a nested tensor", (void)train(engine, s, plain));
    } else {
      EXPECT_TRUE(at::equal(train(engine, s, plain), expected)) << s;
    }
  }
  EXPECT_EQ(engine.report().replays > 0, !refused);
  if (refused) {
    EXPECT_THROWS(UsageError, "graphed call \"takes\": \"0.matrix\" is a nested tensor",
                  (void)make_graphed_callables(engine, {callable_}, {{plain, plain}}));
  }
}

/// Its weight gets a sparse gradient, as that of torch::nn::Embedding with `sparse(true)`.
struct SparseLookup : torch::autograd::Function<SparseLookup> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& weight, const at::Tensor& of) {
    context->save_for_backward({of});
    return weight.index_select(0, of);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    at::Tensor sparse = at::detail::make_tensor<at::SparseTensorImpl>(
        c10::DispatchKeySet(c10::DispatchKey::SparsePrivateUse1), gradients[0].dtype());
    auto& impl = *static_cast<at::SparseTensorImpl*>(sparse.unsafeGetTensorImpl());
    impl.raw_resize_(1, 1, {16, kHidden});
    impl.set_indices_and_values_unsafe(context->get_saved_variables()[0].unsqueeze(0), gradients[0].contiguous());
    return {sparse, at::Tensor()};
  }
};

TEST(SparseGradientTest, IsRefusedByTheCapture) {
  const c10::Device device = find_device("sim");
  torch::nn::Module nothing;
  const at::Tensor weight = rows(1, device).requires_grad_(true);
  const Callable lookup("lookup",
                        owning([weight](const Tensors& in) { return Tensors{SparseLookup::apply(weight, in[0])}; }));
  OffloadEngine engine(nothing, Options(device));
  for (const GradientPolicy policy : {GradientPolicy::cloned, GradientPolicy::owned, GradientPolicy::delayed}) {
    EXPECT_THROWS(CaptureError, "gets a sparse gradient",
                  (void)make_graphed_callables(engine, {lookup}, {{at::arange(6, at::kLong).to(device)}},
                                               GraphOptions().gradients("**", policy)));
  }
}

TEST(SparseGradientTest, IsRefusedByAGraphedStep) {
  const c10::Device device = find_device("sim");
  torch::nn::Module nothing;
  const at::Tensor weight = rows(1, device).requires_grad_(true);
  const Callable step(
      "step", owning([weight](const Tensors& in) { return Tensors{SparseLookup::apply(weight, in[0]).sum()}; }));
  OffloadEngine engine(nothing, Options(device));
  EXPECT_THROWS(UsageError, "graphed step \"step\": a parameter of shape [16, 32] gets a sparse gradient",
                (void)make_graphed_step(engine, step, {{at::arange(6, at::kLong).to(device)}}));
}

std::string name_of_border_form(const testing::TestParamInfo<BorderForm>& info) {
  const std::vector<std::string> forms{"Coo", "Csr", "Nested"};
  return forms[static_cast<std::size_t>(info.param)];
}

INSTANTIATE_TEST_SUITE_P(Forms, CompositeBorderTest,
                         testing::Values(BorderForm::coo, BorderForm::csr, BorderForm::nested), name_of_border_form);

}  // namespace
}  // namespace sidestream::testing_model
