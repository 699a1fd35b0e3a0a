#include <ATen/ATen.h>
#include <sidestream/error.h>
#include <torch/library.h>

#include <string>

#include "operator_cases.h"

namespace {

using sidestream::test::gradients;
using sidestream::test::OperatorCase;
using sidestream::test::parameter;
using sidestream::test::values;
using Tensors = std::vector<at::Tensor>;

std::vector<OperatorCase> view_cases() {
  using D = c10::Device;
  return {
      {"Transposed",
       [](D d) {
         auto x = parameter({4, 8}, d);
         return gradients(x.t().contiguous(), {x});
       }},
      {"Expanded",
       [](D d) {
         auto x = parameter({4, 8}, d);
         return gradients(x.unsqueeze(1).expand({4, 3, 8}).contiguous(), {x});
       }},
      {"Reshaped",
       [](D d) {
         auto x = parameter({4, 8}, d);
         return gradients(x.view({2, 2, 8}).transpose(0, 1).reshape({4, 8}), {x});
       }},
      {"Chunked",
       [](D d) {
         auto x = parameter({4, 8}, d);
         auto parts = x.chunk(2, 1);
         return gradients(parts[0] * parts[1], {x});
       }},
      {"Split",
       [](D d) {
         auto x = parameter({4, 8}, d);
         return gradients(x.split_with_sizes({3, 5}, 1)[1].contiguous(), {x});
       }},
      {"Unbound",
       [](D d) {
         auto x = parameter({4, 8}, d);
         return gradients(x.unbind(0)[1].clone(), {x});
       }},
      {"Diagonal",
       [](D d) {
         auto x = parameter({4, 8}, d);
         return gradients(x.diagonal().clone(), {x});
       }},
      {"Unfolded",
       [](D d) {
         auto x = parameter({4, 8}, d);
         return gradients(x.unfold(1, 2, 1), {x});
       }},
      {"Flattened",
       [](D d) {
         auto x = parameter({4, 8}, d);
         return gradients(x.flatten().clone(), {x});
       }},
      {"MovedDimension",
       [](D d) {
         auto x = parameter({4, 8}, d);
         return gradients(x.movedim(0, 1).clone(), {x});
       }},
      {"AnotherDtype",
       [](D d) {
         return Tensors{values({4, 8}, d).view(at::kInt).clone()};
       }},
      {"Complex",
       [](D d) {
         return Tensors{at::view_as_real(at::view_as_complex(values({4, 2}, d)) * 2).clone()};
       }},
      {"Detached",
       [](D d) {
         auto x = parameter({4}, d);
         auto y = x.detach();
         y.add_(1);
         return Tensors{x.detach()};
       }},
      {"WrittenThrough",
       [](D d) {
         auto x = parameter({4, 8}, d);
         auto y = x * 2;
         y.narrow(1, 0, 4).mul_(3);
         y.select(0, 1).add_(1);
         return gradients(y, {x});
       }},
      {"WrittenThroughUnfold",
       [](D d) {
         auto x = at::zeros({8}, at::TensorOptions().device(d));
         x.unfold(0, 2, 2).fill_(1);
         return Tensors{x};
       }},
      {"SetToStorage",
       [](D d) {
         auto x = values({8}, d);
         return Tensors{at::empty({0}, x.options()).set_(x.storage(), 2, {2, 2}, {2, 1}).clone()};
       }},
      {"SetToWholeStorage",
       [](D d) {
         auto x = values({2, 4}, d);
         return Tensors{at::empty({0}, x.options()).set_(x.storage()).clone()};
       }},
      {"SetToTensor",
       [](D d) {
         auto x = values({8}, d);
         return Tensors{at::empty({0}, x.options()).set_(x.narrow(0, 2, 3)).clone()};
       }},
      {"SetData",
       [](D d) {
         auto x = parameter({8}, d);
         x.set_data(values({8}, d));
         return Tensors{x.detach()};
       }},
      {"Resized",
       [](D d) {
         auto x = at::arange(3, at::TensorOptions().device(d).dtype(at::kFloat));
         x.resize_({5}).narrow(0, 3, 2).fill_(9);
         return Tensors{x};
       }},
      {"ChannelsLast",
       [](D d) {
         auto x = values({2, 3, 4, 4}, d).contiguous(at::MemoryFormat::ChannelsLast);
         return Tensors{x, at::empty_like(x).fill_(1)};
       }},
      {"CopyAcrossDevicesTransposedAndConverted",
       [](D d) {
         auto from = at::randn({4, 3});
         auto there = at::empty({3, 4}, at::TensorOptions().device(d).dtype(at::kBFloat16));
         there.t().copy_(from);
         auto back = at::empty({4, 3});
         back.copy_(there.t());
         return Tensors{back, there};
       }},
      {"CopyBroadcast",
       [](D d) {
         return Tensors{at::empty({4, 3}, at::TensorOptions().device(d)).copy_(at::randn({3}))};
       }},
      {"CopyWithoutBlocking",
       [](D d) {
         return Tensors{at::randn({4, 3}).to(d, true).to(at::kCPU, true)};
       }},
      {"Factories",
       [](D d) {
         const auto on = at::TensorOptions().device(d);
         return Tensors{at::zeros({3}, on),
                        at::ones({3}, on),
                        at::full({3}, 2.0, on),
                        at::arange(5, on),
                        at::eye(3, on),
                        at::linspace(0, 1, 5, on),
                        at::tensor({1.0, 2.0}, on),
                        at::scalar_tensor(3.0, on),
                        at::tril(at::ones({4, 4}, on)),
                        at::zeros_like(at::ones({3}, on))};
       }},
  };
}

SIDESTREAM_OPERATOR_SUITE(OperatorViews, view_cases());

TEST(OperatorViewErrors, ViewBeyondItsStorageIsRefused) {
  const at::Tensor x = values({4}, sidestream::test::sim());
  EXPECT_THROW((void)x.as_strided({8}, {1}), sidestream::UsageError);
}

at::Tensor first_half(const at::Tensor& x) { return x.narrow(0, 0, x.size(0) / 2); }

TEST(OperatorViewErrors, ViewOperatorWithoutKernelIsNamedAndNotCopiedInSilence) {
  torch::Library definition(torch::Library::DEF, "sidestream_test", std::nullopt, __FILE__, __LINE__);
  definition.def("first_half(Tensor(a) x) -> Tensor(a)");
  torch::Library kernel(torch::Library::IMPL, "sidestream_test", c10::DispatchKey::CPU, __FILE__, __LINE__);
  kernel.impl("first_half", &first_half);
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow("sidestream_test::first_half", "")
                      .typed<at::Tensor(const at::Tensor&)>();
  const at::Tensor x = values({4}, sidestream::test::sim());
  try {
    (void)op.call(x);
    FAIL() << "a view operator went through the fallback";
  } catch (const sidestream::UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("sidestream_test::first_half"), std::string::npos) << error.what();
  }
}

}  // namespace
