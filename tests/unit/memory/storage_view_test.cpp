#include "memory/storage_view.h"

#include <cstring>
#include <vector>

#include <ATen/ops/_efficientzerotensor.h>
#include <ATen/ops/_lazy_clone.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/sum.h>
#include <gtest/gtest.h>

#include "sidestream/error.h"

namespace sidestream {
namespace {

const c10::Device cpu(c10::DeviceType::CPU);

// A storage with the same bytes elsewhere, as after a trip through the host.
c10::Storage moved(const at::Tensor& tensor) {
  c10::Storage storage = allocate_storage(cpu, tensor.storage().nbytes());
  if (storage.nbytes() > 0) {
    std::memcpy(storage.mutable_data(), tensor.storage().data(), storage.nbytes());
  }
  return storage;
}

void expect_same(const at::Tensor& restored, const at::Tensor& original) {
  EXPECT_EQ(restored.sizes(), original.sizes());
  EXPECT_EQ(restored.strides(), original.strides());
  EXPECT_EQ(restored.storage_offset(), original.storage_offset());
  EXPECT_EQ(restored.scalar_type(), original.scalar_type());
  EXPECT_EQ(restored.is_conj(), original.is_conj());
  EXPECT_EQ(restored.is_neg(), original.is_neg());
  EXPECT_NE(restored.storage().unsafeGetStorageImpl(), original.storage().unsafeGetStorageImpl());
  EXPECT_TRUE(at::equal(restored, original));
}

TEST(StorageView, RestoresEveryGeometry) {
  const at::Tensor base = at::randn({6, 8, 4});
  const std::vector<at::Tensor> tensors{
      base,
      base.transpose(0, 2),
      base.slice(1, 2, 7, 2),
      base.select(0, 3),
      base.as_strided({5, 5}, {1, 1}, 3),
      base.select(2, 1).select(0, 1).unsqueeze(0).expand({7, 8}),
      at::randn({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast),
      at::full({}, 3.5),
      at::randn({2, 1, 2, 1, 2, 1, 2}),
  };
  for (const at::Tensor& tensor : tensors) {
    SCOPED_TRACE(tensor.sizes());
    expect_same(StorageView::capture(tensor).restore(moved(tensor)), tensor);
  }
}

TEST(StorageView, RestoresEveryDtype) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kBool, at::kByte, at::kLong,
                           at::kComplexFloat, at::kComplexDouble, at::kFloat8_e4m3fn}) {
    const at::Tensor tensor = at::rand({3, 5}).mul(4).to(dtype).t();
    SCOPED_TRACE(toString(dtype));
    const at::Tensor restored = StorageView::capture(tensor).restore(moved(tensor));
    EXPECT_EQ(restored.scalar_type(), dtype);
    EXPECT_EQ(std::memcmp(restored.const_data_ptr(), tensor.const_data_ptr(), tensor.nbytes()), 0);
    EXPECT_EQ(restored.strides(), tensor.strides());
  }
  const at::Tensor bits = at::randn({4, 4}).view(at::kInt).slice(0, 1, 3);
  expect_same(StorageView::capture(bits).restore(moved(bits)), bits);
}

TEST(StorageView, KeepsConjugateAndNegativeBits) {
  const at::Tensor z = at::randn({3, 4}, at::kComplexFloat);
  const at::Tensor conjugate = z.conj().t();
  ASSERT_TRUE(conjugate.is_conj());
  expect_same(StorageView::capture(conjugate).restore(moved(conjugate)), conjugate);
  const at::Tensor negative = at::imag(z.conj());
  ASSERT_TRUE(negative.is_neg());
  expect_same(StorageView::capture(negative).restore(moved(negative)), negative);
}

TEST(StorageView, EmptyTensors) {
  for (const at::Tensor& tensor : {at::empty({0}), at::empty({3, 0, 2}), at::randn({4}).slice(0, 4, 4)}) {
    const StorageView view = StorageView::capture(tensor);
    EXPECT_EQ(view.extent_bytes(), 0U);
    expect_same(view.restore(moved(tensor)), tensor);
  }
}

TEST(StorageView, AliasesStayAliases) {
  const at::Tensor base = at::randn({4, 6});
  const at::Tensor left = base.slice(1, 0, 4), right = base.slice(1, 2, 6).t();
  const c10::Storage storage = moved(base);
  at::Tensor new_left = StorageView::capture(left).restore(storage);
  const at::Tensor new_right = StorageView::capture(right).restore(storage);
  EXPECT_TRUE(new_left.is_alias_of(new_right));
  new_left.fill_(9);
  EXPECT_TRUE(at::equal(new_right.slice(0, 0, 2), at::full({2, 4}, 9.0F)));
  EXPECT_TRUE(at::equal(new_right.slice(0, 2), right.slice(0, 2)));
}

TEST(StorageView, RestoredTensorTakesPartInAutograd) {
  const at::Tensor tensor = at::randn({3, 3});
  at::Tensor restored = StorageView::capture(tensor).restore(moved(tensor));
  EXPECT_TRUE(restored.is_leaf());
  EXPECT_FALSE(restored.requires_grad());
  restored.requires_grad_(true);
  restored.mul(restored).sum().backward();
  EXPECT_TRUE(at::equal(restored.grad(), tensor.mul(2)));
}

TEST(StorageView, RefusesWhatIsNotPlain) {
  EXPECT_FALSE(StorageView::supported(at::Tensor()));
  EXPECT_FALSE(StorageView::supported(at::ones({2, 2}).to_sparse()));
  EXPECT_FALSE(StorageView::supported(at::_efficientzerotensor({2, 2}, at::kFloat)));
  EXPECT_FALSE(StorageView::supported(at::_lazy_clone(at::ones({2, 2}))));
  EXPECT_TRUE(StorageView::supported(at::ones({2, 2})));
  EXPECT_THROW((void)StorageView::capture(at::Tensor()), UsageError);
}

TEST(StorageView, RefusesAStorageThatIsTooSmall) {
  const at::Tensor tensor = at::randn({8, 8}).slice(0, 4);
  const StorageView view = StorageView::capture(tensor);
  EXPECT_EQ(view.extent_bytes(), 256U);
  EXPECT_THROW((void)view.restore(allocate_storage(cpu, 255)), UsageError);
  EXPECT_NO_THROW((void)view.restore(allocate_storage(cpu, 256)));
}

TEST(AllocateStorage, HasTheExactBytes) {
  const c10::Storage storage = allocate_storage(cpu, 1001);
  EXPECT_EQ(storage.nbytes(), 1001U);
  EXPECT_EQ(storage.device(), cpu);
  EXPECT_FALSE(storage.resizable());
  EXPECT_EQ(allocate_storage(cpu, 0).nbytes(), 0U);
  EXPECT_THROW((void)allocate_storage(c10::Device(c10::DeviceType::FPGA, 0), 8), UsageError);
}

}  // namespace
}  // namespace sidestream
