#include <memory>
#include <new>
#include <utility>
#include <vector>

#include <ATen/ops/equal.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "offload/autograd_engine.h"
#include "offload/recorder_books.h"
#include "offload/saved_tensor_recorder.h"

namespace sidestream {
namespace {

// Moves nothing.
class StayingMover final : public StorageMover {
 public:
  void group_ended(Group&) override {}
  c10::Storage fetch(SavedStorage& storage) override { return storage.device; }
  void dropped(SavedStorage&) noexcept override {}
};

// An element that was counted but not made was read at the next clear.
TEST(ReusedElements, OneThatCannotBeMadeIsNotCounted) {
  struct Element {
    Element() {
      if (std::exchange(fails(), false)) {
        throw std::bad_alloc();
      }
    }
    static bool& fails() {
      static bool next = false;
      return next;
    }
  };
  Reused<Element> elements;
  elements.emplace_back();
  Element::fails() = true;
  EXPECT_THROW(elements.emplace_back(), std::bad_alloc);
  EXPECT_EQ(elements.size(), 1U);
}

class RecorderMemory : public ::testing::TestWithParam<std::size_t> {};

// exp saves its own output: a handle that kept the variable itself would keep its node, and so itself, for good.
TEST_P(RecorderMemory, GraphsThatAreDroppedUnusedLeaveNothing) {
  install_autograd_engine();
  ScopeTree tree(NamePatterns::parse("all"));
  Exclusions exclusions(c10::Device(c10::DeviceType::CPU), GetParam());
  SavedTensorRecorder recorder(tree, exclusions, std::make_shared<StayingMover>(), nullptr);
  const at::Tensor x = at::randn({64}).requires_grad_(true);
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> saved;
  {
    const RecorderGuard guard(&recorder);
    at::Tensor y = x;
    for (int i = 0; i < 3; ++i) {
      y = y.mul(y).exp();
      saved.push_back(y.storage().getWeakStorageImpl());
    }
  }
  recorder.finish();
  for (const auto& storage : saved) {
    EXPECT_TRUE(storage.expired());
  }
}

TEST_P(RecorderMemory, GradientsAreThoseOfPlainTraining) {
  install_autograd_engine();
  ScopeTree tree(NamePatterns::parse("all"));
  Exclusions exclusions(c10::Device(c10::DeviceType::CPU), GetParam());
  SavedTensorRecorder recorder(tree, exclusions, std::make_shared<StayingMover>(), nullptr);
  const at::Tensor x = at::randn({64}).requires_grad_(true);
  const auto loss = [&] { return x.mul(x).exp().tanh().sum(); };
  at::Tensor y;
  {
    const RecorderGuard guard(&recorder);
    y = loss();
  }
  recorder.finish();
  EXPECT_TRUE(at::equal(torch::autograd::grad({y}, {x})[0], torch::autograd::grad({loss()}, {x})[0]));
}

// Everything handled by a group, and everything kept as it is.
INSTANTIATE_TEST_SUITE_P(MinBytes, RecorderMemory, ::testing::Values(0, 1 << 20));

}  // namespace
}  // namespace sidestream
