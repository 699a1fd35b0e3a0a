// Sparse, nested and quantised tensors that autograd saves, with LibTorch's own operators on the CPU.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "offload/autograd_engine.h"
#include "offload/saved_tensor_recorder.h"
#include "runtime/composite.h"
#include "sidestream/error.h"
#include "sidestream/scope.h"

namespace sidestream {
namespace {

const c10::Device host(c10::DeviceType::CPU);

c10::Storage copy_of(const c10::Storage& storage) {
  c10::Storage copy = allocate_storage(host, storage.nbytes());
  std::memcpy(copy.mutable_data(), storage.data(), storage.nbytes());
  return copy;
}

/// Takes the memory of what is to be offloaded when its group ends, and gives other memory with the same bytes.
class CopyingMover final : public StorageMover {
 public:
  void group_ended(Group& group) override {
    for (const auto& weak : group.storages) {
      if (const auto saved = weak.lock(); saved != nullptr && saved->to_offload) {
        saved->device = copy_of(saved->device);
        offloaded_bytes += saved->bytes;
        ++offloaded;
      }
    }
  }
  c10::Storage fetch(SavedStorage& storage) override {
    ++fetched;
    return copy_of(storage.device);
  }
  void dropped(SavedStorage& /*storage*/) noexcept override {}

  std::uint64_t offloaded_bytes = 0;
  int offloaded = 0;
  int fetched = 0;
};

/// Saves what `Make` makes of x; its gradient is computed from that.
template <at::Tensor (*Make)(const at::Tensor&)>
class Saves : public torch::autograd::Function<Saves<Make>> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({Make(x)});
    return x.tanh();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const at::Tensor saved = context->get_saved_variables()[0];
    return {gradients[0] * (saved.is_quantized() ? saved.dequantize() : saved.to_dense())};
  }
};

/// Saves a tensor that it is given, and does not use it. By its address: an argument that is a tensor may not be nested.
class SavesGiven : public torch::autograd::Function<SavesGiven> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor* given) {
    context->save_for_backward({*given});
    return x.tanh();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    (void)context->get_saved_variables();
    return {gradients[0], {}};
  }
};

at::Tensor by_tensor(const at::Tensor& x) { return at::quantize_per_tensor(x, 0.05, 3, at::kQInt8); }
at::Tensor by_channel(const at::Tensor& x) {
  return at::quantize_per_channel(x, x.abs().amax(0) / 100, at::arange(8), 1, at::kQInt8);
}
at::Tensor by_channel_of_floats(const at::Tensor& x) {
  return at::quantize_per_channel(x, x.abs().amax(0) / 100, at::rand({8}), 1, at::kQUInt8);
}

at::Tensor blocks(const at::Tensor& x) { return at::relu(x).to_sparse_bsr({2, 2}); }
at::Tensor columns(const at::Tensor& x) { return at::relu(x).to_sparse_csc(); }

at::Tensor mostly_zero(const at::Tensor& x) { return at::relu(x) * 2; }
at::Tensor two_parts(const at::Tensor& x) {
  return at::_nested_tensor_from_tensor_list({x.slice(0, 0, 3), x.slice(0, 3)});
}

/// A computation of x and w, which are [8, 8] and require grad.
struct Saving {
  std::string name;
  int offloaded;  ///< storages
  std::function<at::Tensor(const at::Tensor& x, const at::Tensor& w)> run;
};

/// The result of exp, which saves it, is also the values of a sparse matrix.
at::Tensor weighted(const at::Tensor& x, const at::Tensor& w) {
  const at::Tensor values = (x * w).view({64}).exp();
  const at::Tensor indices = at::ones({8, 8}).nonzero().t().contiguous();
  const at::Tensor matrix = at::_sparse_coo_tensor_unsafe(indices, values, {8, 8}, {}, {}, {}, {}, true);
  return at::mm(matrix.detach(), w * 3) * values.view({8, 8});
}

std::vector<Saving> savings() {
  using At = const at::Tensor&;
  return {
      {"coo", 4, [](At x, At w) { return at::_sparse_mm(mostly_zero(x).to_sparse(), w * 2); }},
      {"coo_of_its_values", 3, weighted},
      {"csr", 4, [](At x, At w) { return at::mm(mostly_zero(x.detach()).to_sparse_csr(), w * 2) * x; }},
      {"csc", 3, [](At x, At w) { return Saves<columns>::apply(x * w); }},
      {"bsr", 3, [](At x, At w) { return Saves<blocks>::apply(x * w); }},
      {"nested", 3, [](At x, At w) { return at::linear(two_parts(x * 2), w).to_padded_tensor(0); }},
      {"nested_softmax", 2, [](At x, At /*w*/) { return at::softmax(two_parts(x * 2), -1).to_padded_tensor(0); }},
      {"per_tensor", 1, [](At x, At w) { return Saves<by_tensor>::apply(x * w); }},
      {"per_channel", 3, [](At x, At w) { return Saves<by_channel>::apply(x * w); }},
      {"per_channel_of_floats", 3, [](At x, At w) { return Saves<by_channel_of_floats>::apply(x * w); }},
  };
}

void PrintTo(const Saving& saving, std::ostream* out) { *out << saving.name; }

class SavedCompositesBase {
 protected:
  SavedCompositesBase() { install_autograd_engine(); }

  /// `run` in a scope "block" of `recorder_`, then the end of the pass.
  template <class Run>
  auto record(const Run& run) {
    recorder_ = std::make_unique<SavedTensorRecorder>(tree_, exclusions_, mover_, nullptr);
    const RecorderGuard guard(recorder_.get());
    OffloadScope scope("block");
    auto result = run();
    scope.end();
    recorder_->finish();
    return result;
  }
  /// How many stayed in the latest pass.
  [[nodiscard]] std::uint64_t tensors(const std::string& reason) const {
    std::uint64_t count = 0;
    for (const StayingTensors& staying : recorder_->profile().staying) {
      count += staying.reason.rfind(reason, 0) == 0 ? staying.tensors : 0;
    }
    return count;
  }
  at::Tensor sparse() { return mostly_zero(x_.detach()).to_sparse(); }

  ScopeTree tree_{NamePatterns::parse("**")};
  Exclusions exclusions_{host, 0};
  std::shared_ptr<CopyingMover> mover_ = std::make_shared<CopyingMover>();
  std::unique_ptr<SavedTensorRecorder> recorder_;
  at::Tensor x_ = at::randn({8, 8}).requires_grad_(true);
  at::Tensor w_ = at::randn({8, 8}).requires_grad_(true);
};

class SavedCompositesTest : public SavedCompositesBase, public testing::TestWithParam<Saving> {};

TEST_P(SavedCompositesTest, GradientsAreThoseOfPlainTraining) {
  const auto gradients = [&](const at::Tensor& y) {
    return torch::autograd::grad({y}, {x_, w_}, {at::arange(y.numel()).view(y.sizes()).to(at::kFloat)},
                                 /*retain_graph=*/true, /*create_graph=*/false, /*allow_unused=*/true);
  };
  const auto run = [&] {
    at::manual_seed(3);
    return GetParam().run(x_, w_);
  };
  const auto expected = gradients(run());
  const at::Tensor y = record(run);
  for (int i = 0; i < 2; ++i) {
    const auto got = gradients(y);
    for (std::size_t j = 0; j < expected.size(); ++j) {
      ASSERT_EQ(got[j].defined(), expected[j].defined());
      EXPECT_TRUE(!got[j].defined() || at::equal(got[j], expected[j])) << j;
    }
  }
  EXPECT_EQ(tensors("unsupported"), 0U);
  EXPECT_EQ(mover_->offloaded, GetParam().offloaded);
  EXPECT_EQ(mover_->offloaded_bytes, recorder_->saved_bytes());
  EXPECT_EQ(recorder_->counts().copied_twice_bytes, 0U);
  EXPECT_GE(mover_->fetched, 2 * GetParam().offloaded);
}

INSTANTIATE_TEST_SUITE_P(Savings, SavedCompositesTest, testing::ValuesIn(savings()),
                         [](const testing::TestParamInfo<Saving>& info) { return info.param.name; });

class SavedComposites : public SavedCompositesBase, public testing::Test {};

TEST_F(SavedComposites, PartsAreFreedOnceTheyAreOffloaded) {
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> parts;
  const at::Tensor y = record([&] {
    const at::Tensor matrix = sparse();
    for_each_part(matrix, [&](const at::Tensor& part) { parts.push_back(part.storage().getWeakStorageImpl()); });
    return at::mm(matrix, w_);
  });
  ASSERT_EQ(parts.size(), 2U);
  for (const auto& part : parts) {
    EXPECT_TRUE(part.expired());
  }
}

TEST_F(SavedComposites, ATensorOfSeveralSaversIsOffloadedOnceAndStaysAsItWas) {
  const at::Tensor values = at::randn({64});
  const at::Tensor matrix =
      at::_sparse_coo_tensor_unsafe(at::ones({8, 8}).nonzero().t().contiguous(), values, {8, 8}, {}, {}, {}, {}, true);
  const at::Tensor nested = two_parts(x_.detach());
  const at::Tensor y = record([&] {
    const at::Tensor twice = SavesGiven::apply(x_, &nested) + SavesGiven::apply(x_, &nested);
    return at::mm(matrix, at::mm(matrix, w_)).sum() + (values * w_.view({64})).sum() + twice.sum();
  });
  EXPECT_EQ(mover_->offloaded, 3) << "indices, values, and the nested tensor's storage";
  EXPECT_EQ(recorder_->counts().copied_twice_bytes, 0U);
  EXPECT_TRUE(matrix._values().is_alias_of(values));
  EXPECT_EQ(matrix._version(), 0);
  EXPECT_EQ(nested._version(), 0);
}

TEST_F(SavedComposites, TheLimitOfSmallStoragesIsForEachPart) {
  Exclusions limited(host, 300);
  const at::Tensor matrix = at::ones({8, 8}).to_sparse();  // 1024 bytes of indices, 256 of values
  SavedTensorRecorder pass(tree_, limited, mover_, nullptr);
  {
    const RecorderGuard guard(&pass);
    const at::Tensor y = at::mm(matrix, w_);
  }
  pass.finish();
  EXPECT_EQ(pass.saved_bytes(), 1024U);
  const std::vector<StayingTensors> staying = pass.profile().staying;
  const auto small = std::find_if(staying.begin(), staying.end(),
                                  [](const StayingTensors& of_reason) { return of_reason.reason == "small"; });
  ASSERT_NE(small, staying.end());
  EXPECT_EQ(small->tensors, 1U);
  EXPECT_EQ(small->bytes, 256U);
  EXPECT_EQ(pass.small_bytes(), 256U);
}

TEST_F(SavedComposites, MarksTagsAndBuffersHoldForTheirParts) {
  const at::Tensor marked = sparse(), tagged = sparse(), buffer = sparse();
  exclusions_.set_parameters({w_, buffer});
  EXPECT_FALSE(exclusions_.refresh_parameters());
  const at::Tensor y = record([&] {
    mark_not_offload(marked);
    return at::mm(marked, w_) + at::mm(tag(tagged, "adjacency"), w_) + at::mm(buffer, w_);
  });
  EXPECT_EQ(tensors("marked"), 2U);
  EXPECT_EQ(tensors("parameter"), 2U);
  const Profile profile = recorder_->profile();
  ASSERT_EQ(profile.groups.size(), 1U);
  EXPECT_EQ(profile.groups[0].name, "block.adjacency");
  EXPECT_EQ(mover_->offloaded, 2);
  buffer.copy_(sparse());
  EXPECT_TRUE(exclusions_.refresh_parameters()) << "a part of the buffer has other memory";
}

TEST_F(SavedComposites, AMarkAfterTheSaveHoldsToo) {
  const at::Tensor y = record([&] {
    const at::Tensor matrix = sparse();
    at::Tensor product = at::mm(matrix, w_);
    mark_not_offload(matrix);
    return product;
  });
  EXPECT_EQ(mover_->offloaded, 0);
}

TEST_F(SavedComposites, ALeafThatRequiresGradIsAParameter) {
  const at::Tensor leaf = sparse().requires_grad_(true);
  const at::Tensor y = record([&] { return at::_sparse_mm(leaf, w_); });
  EXPECT_EQ(tensors("parameter"), 2U) << "the leaf and w_";
  EXPECT_EQ(mover_->offloaded, 0);
  EXPECT_TRUE(torch::autograd::grad({y.sum()}, {leaf})[0].defined());
}

TEST_F(SavedComposites, OthersStayAndTheReportNamesThem) {
  const at::Tensor opaque = at::ones({8, 8}).to_mkldnn();
  const at::Tensor y = record([&] { return SavesGiven::apply(x_, &opaque); });
  EXPECT_EQ(tensors("unsupported (Mkldnn)"), 1U);
  EXPECT_EQ(mover_->offloaded, 0);
  EXPECT_TRUE(at::equal(torch::autograd::grad({y.sum()}, {x_})[0], at::ones({8, 8})));
}

TEST_F(SavedComposites, AWriteBetweenSaveAndBackwardNamesTheGroup) {
  for (const bool into_a_part : {false, true}) {
    const at::Tensor values = at::randn({64});  // autograd itself does not see that the matrix has them
    const at::Tensor matrix =
        at::_sparse_coo_tensor_unsafe(at::ones({8, 8}).nonzero().t().contiguous(), values, {8, 8});
    const at::Tensor y = record([&] { return at::mm(matrix, w_); });
    if (into_a_part) {
      values.mul_(2);
    } else {
      matrix.mul_(2);
    }
    try {
      (void)torch::autograd::grad({y.sum()}, {w_});
      FAIL() << "the gradient would not have been that of plain training";
    } catch (const UsageError& error) {
      EXPECT_PRED_FORMAT2(testing::IsSubstring, "\"block\"", error.what());
    }
  }
}

TEST_F(SavedComposites, PartsMayBeInferenceTensors) {
  at::Tensor indices;
  {
    const c10::InferenceMode inference;
    indices = at::ones({8, 8}).nonzero().t().contiguous();
  }
  const at::Tensor matrix = at::_sparse_coo_tensor_unsafe(indices, at::randn({64}), {8, 8});
  const at::Tensor y = record([&] { return at::mm(matrix, w_); });
  EXPECT_GT(mover_->offloaded, 0);
  EXPECT_TRUE(at::equal(torch::autograd::grad({y.sum()}, {w_})[0], at::mm(matrix.t(), at::ones({8, 8}))));
}

TEST_F(SavedComposites, ASparseParameterHasBytes) {
  const at::Tensor leaf = sparse().requires_grad_(true);
  exclusions_.set_parameters({leaf});
  const std::size_t indices = leaf._indices().nbytes();
  const std::size_t values = leaf._values().nbytes();
  EXPECT_EQ(exclusions_.gradient_bytes(), allocated_bytes(indices) + allocated_bytes(values));
  EXPECT_EQ(exclusions_.registered_bytes(), indices + values);
}

}  // namespace
}  // namespace sidestream
