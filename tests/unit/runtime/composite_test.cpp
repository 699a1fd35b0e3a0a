#include "runtime/composite.h"

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/variable.h>

namespace sidestream {
namespace {

struct Form {
  std::string name;
  std::size_t parts;
  std::function<at::Tensor()> make;
};

at::Tensor with_zeros() { return at::randn({6, 8}).relu_(); }

at::Tensor coo() {
  const at::Tensor indices = at::tensor({0, 2, 2, 1, 3, 3}, at::kLong).view({2, 3});
  return at::sparse_coo_tensor(indices, at::randn({3}), {4, 5}, at::TensorOptions().layout(at::kSparse));
}

at::Tensor nested() { return at::_nested_tensor_from_tensor_list({at::randn({2, 4}), at::randn({5, 4})}); }

at::Tensor per_channel(const at::Tensor& zero_points, at::ScalarType type) {
  return at::quantize_per_channel(at::randn({3, 4}), at::rand({4}).add_(0.1), zero_points, 1, type);
}

std::vector<Form> forms() {
  return {
      {"coo", 2, coo},
      {"coo_coalesced", 2, [] { return coo().coalesce(); }},
      {"coo_hybrid", 2,
       [] {
         return at::randn({3, 4, 2}).to_sparse(2);
       }},
      {"coo_empty", 2,
       [] {
         return at::zeros({3, 4}).to_sparse();
       }},
      {"coo_transposed", 2, [] { return coo().transpose(0, 1); }},
      {"csr", 3, [] { return with_zeros().to_sparse_csr(); }},
      {"csr_batched", 3,
       [] {
         return at::ones({2, 3, 4}).to_sparse_csr();
       }},
      {"csc", 3, [] { return with_zeros().to_sparse_csc(); }},
      {"bsr", 3,
       [] {
         return with_zeros().to_sparse_bsr({2, 4});
       }},
      {"bsc", 3,
       [] {
         return with_zeros().to_sparse_bsc({3, 2});
       }},
      {"nested", 1, nested},
      {"nested_transposed", 1, [] { return nested().transpose(1, 2); }},
      {"nested_of_half", 1, [] { return nested().to(at::kHalf); }},
      {"per_tensor", 1,
       [] {
         return at::quantize_per_tensor(at::randn({3, 4}), 0.1, 3, at::kQInt8);
       }},
      {"per_tensor_strided", 1,
       [] {
         return at::quantize_per_tensor(at::randn({3, 4}), 0.1, 3, at::kQInt32).t().slice(0, 1, 3);
       }},
      {"per_channel", 3, [] { return per_channel(at::arange(4), at::kQInt8); }},
      {"per_channel_of_floats", 3, [] { return per_channel(at::rand({4}), at::kQUInt8); }},
  };
}

class CompositeTest : public testing::TestWithParam<Form> {};

void expect_same_values(const at::Tensor& rebuilt, const at::Tensor& original) {
  if (original.is_nested()) {
    const auto& mine = *at::native::get_nested_tensor_impl(rebuilt);
    const auto& theirs = *at::native::get_nested_tensor_impl(original);
    EXPECT_TRUE(at::equal(mine.get_nested_sizes(), theirs.get_nested_sizes()));
    EXPECT_TRUE(at::equal(mine.get_nested_strides(), theirs.get_nested_strides()));
    EXPECT_TRUE(at::equal(mine.get_storage_offsets(), theirs.get_storage_offsets()));
    const std::vector<at::Tensor> expected = original.unbind();
    const std::vector<at::Tensor> got = rebuilt.unbind();
    ASSERT_EQ(got.size(), expected.size());
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(at::equal(got[i], expected[i])) << i;
    }
    return;
  }
  EXPECT_EQ(rebuilt.sizes(), original.sizes());
  if (original.is_quantized()) {
    EXPECT_EQ(rebuilt.strides(), original.strides());
    EXPECT_EQ(rebuilt.storage_offset(), original.storage_offset());
    EXPECT_TRUE(at::get_qtensorimpl(rebuilt)->quantizer()->equalTo(at::get_qtensorimpl(original)->quantizer()));
    EXPECT_TRUE(at::equal(rebuilt.int_repr(), original.int_repr()));
    EXPECT_TRUE(at::equal(rebuilt.dequantize(), original.dequantize()));
    return;
  }
  EXPECT_EQ(rebuilt.sparse_dim(), original.sparse_dim());
  EXPECT_EQ(rebuilt.dense_dim(), original.dense_dim());
  if (original.is_sparse()) {
    EXPECT_EQ(rebuilt.is_coalesced(), original.is_coalesced());
    EXPECT_TRUE(at::equal(rebuilt._indices(), original._indices()));
    EXPECT_TRUE(at::equal(rebuilt._values(), original._values()));
  }
  EXPECT_TRUE(at::equal(rebuilt.to_dense(), original.to_dense()));
}

TEST_P(CompositeTest, IsRebuiltFromCopiesOfItsParts) {
  const at::Tensor original = GetParam().make();
  ASSERT_TRUE(is_composite(original));
  const std::int64_t version = original._version();
  const std::optional<Composite> composite = split(original);
  ASSERT_TRUE(composite.has_value());
  ASSERT_EQ(composite->parts.size(), GetParam().parts);
  std::vector<at::Tensor> copies;
  for (const at::Tensor& part : composite->parts) {
    EXPECT_FALSE(is_composite(part));
    EXPECT_EQ(part.layout(), at::kStrided);
    copies.push_back(part.clone(at::MemoryFormat::Preserve));
  }
  const at::Tensor rebuilt = composite->rebuild(copies);
  EXPECT_EQ(rebuilt.key_set(), original.key_set());
  EXPECT_EQ(rebuilt.dtype(), original.dtype());
  EXPECT_EQ(rebuilt.layout(), original.layout());
  EXPECT_EQ(rebuilt.device(), original.device());
  EXPECT_FALSE(rebuilt.requires_grad());
  expect_same_values(rebuilt, original);
  // Each lies in memory of its own.
  const std::optional<Composite> again = split(rebuilt);
  for (std::size_t i = 0; i < copies.size(); ++i) {
    EXPECT_TRUE(again->parts[i].storage().is_alias_of(copies[i].storage())) << i;
    EXPECT_TRUE(split(original)->parts[i].storage().is_alias_of(composite->parts[i].storage())) << i;
  }
  EXPECT_EQ(original._version(), version);
}

// A reader may meet the same storage as a plain tensor too: it is one storage, in one version.
TEST_P(CompositeTest, WritesThroughItAreWritesToItsOwnStorage) {
  const at::Tensor original = GetParam().make();
  if (!original.has_storage()) {
    return;
  }
  const c10::InferenceMode inference;
  const at::Tensor bytes = split(original)->parts[0];
  torch::autograd::impl::bump_version(original);
  EXPECT_EQ(bytes._version(), original._version());
  EXPECT_EQ(bytes.nbytes(), original.storage().nbytes());
}

TEST(Composite, PlainTensorsAndOthersAreNotSplit) {
  for (const at::Tensor& tensor : {at::empty({2}, at::TensorOptions().dtype(at::kQInt8)), at::Tensor(), at::ones({2}),
                                   at::ones({2}).t(), at::_efficientzerotensor({2}), at::ones({2, 2}).to_mkldnn()}) {
    EXPECT_FALSE(split(tensor).has_value());
    std::size_t seen = 0;
    for_each_part(tensor, [&](const at::Tensor& part) {
      EXPECT_TRUE(part.is_same(tensor));
      ++seen;
    });
    EXPECT_EQ(seen, 1U);
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, CompositeTest, testing::ValuesIn(forms()),
                         [](const testing::TestParamInfo<Form>& info) { return info.param.name; });

}  // namespace
}  // namespace sidestream
