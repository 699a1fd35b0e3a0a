#include <ATen/ATen.h>

#include "operator_cases.h"

namespace {

using sidestream::test::gradients;
using sidestream::test::indices;
using sidestream::test::OperatorCase;
using sidestream::test::parameter;
using sidestream::test::values;
using Tensors = std::vector<at::Tensor>;
using D = c10::Device;

std::vector<OperatorCase> index_cases() {
  return {
      {"TopK",
       [](D d) {
         auto x = parameter({8, 16}, d);
         auto [value, index] = at::topk(x, 2, -1);
         Tensors results = gradients(value, {x});
         results.push_back(index);
         return results;
       }},
      {"IndexSelect",
       [](D d) {
         auto x = parameter({8, 4}, d);
         return gradients(at::index_select(x, 0, indices(4, 4, d)), {x});
       }},
      {"Index",
       [](D d) {
         auto x = parameter({8, 4}, d);
         return gradients(at::index(x, {indices(6, 4, d)}), {x});
       }},
      {"IndexByTwo",
       [](D d) {
         auto x = parameter({8, 4}, d);
         auto i = indices(4, 4, d);
         return gradients(at::index(x, {i, i}), {x});
       }},
      {"IndexByHostTensor",
       [](D d) {
         auto x = parameter({8, 4}, d);
         return gradients(at::index(x, {indices(4, 4, at::kCPU)}), {x});
       }},
      {"IndexByMask",
       [](D d) {
         auto x = parameter({8, 4}, d);
         return gradients(at::index(x, {x.detach() > 0}), {x});
       }},
      {"MaskedSelect",
       [](D d) {
         auto x = parameter({8, 4}, d);
         return gradients(at::masked_select(x, x.detach() > 0), {x});
       }},
      {"Nonzero",
       [](D d) {
         auto x = values({8, 4}, d);
         return Tensors{at::nonzero(x > 0), at::where(x > 0)[0]};
       }},
      {"IndexAdd",
       [](D d) {
         auto x = parameter({8, 4}, d), s = parameter({4, 4}, d);
         return gradients(at::index_add(x, 0, indices(4, 3, d), s), {x, s});
       }},
      {"IndexPutAccumulates",
       [](D d) {
         auto x = values({8, 4}, d);
         x.index_put_({indices(4, 2, d)}, values({4, 4}, d), true);
         return Tensors{x};
       }},
      {"MaskedFillByIndexPut",
       [](D d) {
         auto x = values({8, 4}, d);
         x.index_put_({x > 0}, at::full({}, 3.0, x.options()));
         return Tensors{x};
       }},
      {"ScatterAndGather",
       [](D d) {
         auto x = parameter({8, 4}, d);
         auto i = indices(8, 4, d).view({8, 1});
         auto g = at::gather(x, 1, i);
         return gradients(at::zeros_like(x).scatter(1, i, g) + at::scatter_add(x, 1, i, g), {x});
       }},
      {"OneHot", [](D d) { return Tensors{at::one_hot(indices(8, 4, d), 4)}; }},
      {"SortAndCount",
       [](D d) {
         auto i = indices(8, 4, d);
         auto [sorted, order] = at::sort(i, true, 0, false);
         return Tensors{at::bincount(i), sorted, order, at::cumsum(i, 0), at::argsort(i, true, 0, false)};
       }},
      {"Unique", [](D d) { return Tensors{std::get<0>(at::_unique(indices(8, 4, d)))}; }},
      {"ExpertRouting",
       [](D d) {
         auto x = parameter({12, 8}, d), gate = parameter({4, 8}, d), expert = parameter({8, 8}, d);
         auto [weight, choice] = at::topk(at::softmax(at::linear(x, gate), -1), 2, -1);
         auto y = at::zeros_like(x);
         for (std::int64_t e = 0; e < 4; ++e) {
           auto where = at::where(choice == e);
           auto routed = at::linear(at::index_select(x, 0, where[0]), expert) *
                         at::index(weight, {where[0], where[1]}).unsqueeze(1);
           y = at::index_add(y, 0, where[0], routed);
         }
         return gradients(y, {x, gate, expert});
       }},
      {"GroupedMatmul",
       [](D d) {
         auto x = values({16, 16}, d, at::kBFloat16), w = values({2, 16, 16}, d, at::kBFloat16);
         auto ends = at::tensor({8, 16}, at::kInt).to(d);
         return Tensors{at::_grouped_mm(x, w, ends)};
       }},
  };
}

SIDESTREAM_OPERATOR_SUITE(OperatorIndexing, index_cases());

}  // namespace
