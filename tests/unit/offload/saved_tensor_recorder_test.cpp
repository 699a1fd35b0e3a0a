#include "offload/saved_tensor_recorder.h"

#include <memory>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "offload/autograd_engine.h"
#include "sidestream/error.h"
#include "sidestream/scope.h"

namespace sidestream {
namespace {

/// Notes what it is told and moves nothing.
class NotingMover final : public StorageMover {
 public:
  void group_ended(Group& group) override {
    std::size_t moving = 0;
    for (const auto& weak : group.storages) {
      const auto saved = weak.lock();
      moving += saved != nullptr && saved->to_offload ? 1 : 0;
    }
    ended.push_back(group.scope->name + ":" + std::to_string(group.storages.size()) + ":" + std::to_string(moving) +
                    (group.needed_immediately ? ":stays" : ""));
  }
  c10::Storage fetch(SavedStorage& storage) override {
    ++fetched;
    return storage.device;
  }
  void dropped(SavedStorage& /*storage*/) noexcept override { ++dropped_storages; }

  std::vector<std::string>
      ended;  ///< "name:storages saved first:of those that move", and whether backward needs it immediately
  int fetched = 0;
  int dropped_storages = 0;
};

/// One storage of [64] floats.
constexpr std::uint64_t kBlockBytes = 256;

class RecorderTest : public testing::Test {
 protected:
  RecorderTest() { install_autograd_engine(); }

  [[nodiscard]] std::unique_ptr<SavedTensorRecorder> recorder(const PlannedPass* planned = nullptr) {
    return std::make_unique<SavedTensorRecorder>(tree_, exclusions_, mover_, planned);
  }

  /// Names of the profile's groups with the bytes that they saved first.
  static std::vector<std::string> described(const Profile& profile) {
    std::vector<std::uint64_t> bytes(profile.groups.size());
    for (const StorageProfile& storage : profile.storages) {
      bytes[storage.savers.front()] += storage.bytes;
    }
    std::vector<std::string> result;
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      result.push_back(profile.groups[i].name + ":" + std::to_string(bytes[i] / kBlockBytes));
    }
    return result;
  }

  ScopeTree tree_{NamePatterns::parse("**")};
  Exclusions exclusions_{c10::Device(c10::DeviceType::CPU), 0};
  std::shared_ptr<NotingMover> mover_ = std::make_shared<NotingMover>();
  at::Tensor x_ = at::randn({64}).requires_grad_(true);
};

TEST_F(RecorderTest, TheInnermostScopeOwns) {
  const auto pass = recorder();
  at::Tensor h = x_ * 2;
  {
    const RecorderGuard guard(pass.get());
    const OffloadScope outer("outer");
    h = h.exp();
    {
      const OffloadScope inner("inner");
      h = h.tanh();
      const OffloadScope empty("empty");
    }
    h = h.sigmoid();
  }
  pass->finish();
  EXPECT_EQ(described(pass->profile()), (std::vector<std::string>{"outer:2", "outer.inner:1"}));
  EXPECT_EQ(mover_->ended, (std::vector<std::string>{"outer.inner:1:1", "outer:2:2"}))
      << "inner first; empty ones are no groups";
  EXPECT_EQ(pass->saved_bytes(), 3 * kBlockBytes);
}

TEST_F(RecorderTest, AScopeEnteredTwiceIsTwoGroups) {
  const auto pass = recorder();
  at::Tensor h = x_ * 2;
  {
    const RecorderGuard guard(pass.get());
    for (int i = 0; i < 2; ++i) {
      const OffloadScope scope("again");
      h = h.exp();
    }
  }
  pass->finish();
  EXPECT_EQ(described(pass->profile()), (std::vector<std::string>{"again:1", "again:1"}));
}

TEST_F(RecorderTest, OneStorageMovesOnceHoweverManySaveIt) {
  const auto pass = recorder();
  at::Tensor h = x_ * 2;
  {
    const RecorderGuard guard(pass.get());
    {
      const OffloadScope scope("maker");
      h = h.exp();
    }
    {
      const OffloadScope scope("reader");
      h = h.view({8, 8}).mul(h.view({8, 8}).t()).sin();
    }
  }
  pass->finish();
  const Profile profile = pass->profile();
  EXPECT_EQ(profile.storages[0].savers, (std::vector<std::uint32_t>{0, 1}));
  EXPECT_EQ(described(profile), (std::vector<std::string>{"maker:1", "reader:1"}));
  const at::Tensor mine = torch::autograd::grad({h.sum()}, {x_})[0];
  const at::Tensor y = (x_ * 2).exp();
  EXPECT_TRUE(at::equal(mine, torch::autograd::grad({y.view({8, 8}).mul(y.view({8, 8}).t()).sin().sum()}, {x_})[0]));
}

TEST_F(RecorderTest, ATagTakesWhatIsSavedLater) {
  const auto pass = recorder();
  at::Tensor h = x_ * 2;
  {
    const RecorderGuard guard(pass.get());
    const OffloadScope scope("block");
    const at::Tensor gate = tag(h * 3, "gate");
    {
      const OffloadScope inner("inner");
      h = gate.sin();
    }
    h = h.exp();
  }
  pass->finish();
  EXPECT_EQ(described(pass->profile()), (std::vector<std::string>{"block.gate:1", "block:1"}));
  EXPECT_EQ(mover_->ended, (std::vector<std::string>{"block.gate:1:1", "block:1:1"}));
}

TEST_F(RecorderTest, APlanDecidesWhatMoves) {
  const auto run = [&](SavedTensorRecorder& pass, int times) {
    const RecorderGuard guard(&pass);
    at::Tensor h = x_ * 2;
    for (int i = 0; i < times; ++i) {
      const OffloadScope scope("loop");
      h = h.exp().tanh();
    }
    return h;
  };
  const auto first = recorder();
  (void)run(*first, 2);
  first->finish();
  mover_->ended.clear();
  const std::vector<Decision> decisions{
      {Fate::offloaded, 0}, {Fate::held_back, 0}, {Fate::needed_immediately, 0}, {Fate::offloaded, 0}};
  const PlannedPass planned = lay_out(first->profile(), first->group_scopes(), decisions.data());
  const auto second = recorder(&planned);
  const at::Tensor kept = run(*second, 3);
  second->finish();
  EXPECT_EQ(mover_->ended, (std::vector<std::string>{"loop:2:1", "loop:2:1:stays", "loop:2:2:stays"}))
      << "the third time round is not in the plan: as the last that is";
  EXPECT_EQ(second->counts().unplanned_bytes, 2 * kBlockBytes);
}

TEST_F(RecorderTest, MarkedTensorsStayWhetherSavedBeforeOrAfter) {
  const auto first = recorder();
  const auto run = [&](SavedTensorRecorder& pass, bool mark) {
    const RecorderGuard guard(&pass);
    const OffloadScope scope("block");
    const at::Tensor saved = (x_ * 2).exp();
    if (mark) {
      mark_not_offload(saved);
    }
    return saved.tanh();
  };
  (void)run(*first, false);
  first->finish();
  mover_->ended.clear();
  const std::vector<Decision> decisions(2, {Fate::offloaded, 0});
  const PlannedPass planned = lay_out(first->profile(), first->group_scopes(), decisions.data());
  for (const bool mark : {false, true}) {
    const auto pass = recorder(&planned);
    const at::Tensor kept = run(*pass, mark);
    pass->finish();
  }
  EXPECT_EQ(mover_->ended, (std::vector<std::string>{"block:2:2", "block:2:1"}));
}

TEST_F(RecorderTest, AMarkHoldsForAllRecordsOfTheStorage) {
  const auto pass = recorder();
  const at::Tensor buffer = at::randn({128});
  at::Tensor y;
  {
    const RecorderGuard guard(pass.get());
    const OffloadScope scope("block");
    const std::vector<at::Tensor> parts = at::unsafe_chunk(buffer, 2);  // each with versions of its own
    y = x_ * parts[0] + x_ * parts[1];
    mark_not_offload(parts[1]);
  }
  pass->finish();
  EXPECT_EQ(pass->counts().copied_twice_bytes, 2 * kBlockBytes) << "two records";
  EXPECT_EQ(mover_->ended, (std::vector<std::string>{"block:2:0"}));
}

TEST_F(RecorderTest, AWriteBetweenSaveAndUnpackNamesTheGroup) {
  const auto pass = recorder();
  at::Tensor saved;
  at::Tensor y;
  {
    const RecorderGuard guard(pass.get());
    const OffloadScope outer("outer");
    const OffloadScope inner("inner");
    saved = (x_ * 2).exp();
    y = saved * 3;
  }
  pass->finish();
  {
    const at::NoGradGuard no_grad;
    saved.add_(1);
  }
  try {
    (void)torch::autograd::grad({y.sum()}, {x_});
    FAIL() << "the gradient would have been wrong";
  } catch (const UsageError& error) {
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "\"outer.inner\"", error.what());
  }
}

TEST_F(RecorderTest, AStorageWrittenBetweenTwoSavesIsTwoVersions) {
  const auto pass = recorder();
  at::Tensor first;
  at::Tensor buffer = at::randn({64});
  {
    const RecorderGuard guard(pass.get());
    const OffloadScope scope("block");
    first = x_ * buffer;
    buffer.add_(1);
    (void)(x_ * buffer);
  }
  const at::Tensor kept = first;
  pass->finish();
  EXPECT_EQ(pass->counts().copied_twice_bytes, kBlockBytes);
}

TEST_F(RecorderTest, ARetainedGraphFetchesAgainAndDropsOnce) {
  const auto pass = recorder();
  at::Tensor y;
  {
    const RecorderGuard guard(pass.get());
    y = (x_ * 2).exp();
  }
  pass->finish();
  const at::Tensor sum = y.sum();
  const at::Tensor once = torch::autograd::grad({sum}, {x_}, {}, /*retain_graph=*/true)[0];
  const at::Tensor twice = torch::autograd::grad({sum}, {x_}, {}, /*retain_graph=*/true)[0];
  EXPECT_TRUE(at::equal(once, twice));
  EXPECT_EQ(mover_->fetched, 2);
  EXPECT_EQ(mover_->dropped_storages, 0);
}

TEST_F(RecorderTest, ScopesLeftByAnExceptionEndNoGroup) {
  const auto pass = recorder();
  {
    const RecorderGuard guard(pass.get());
    try {
      const OffloadScope outer("outer");
      const at::Tensor h = (x_ * 2).exp();
      const OffloadScope inner("inner");
      (void)h.tanh();
      throw CaptureError("the model broke");
    } catch (const CaptureError&) {
    }
    EXPECT_EQ(pass->depth(), 1U);
    EXPECT_TRUE(mover_->ended.empty());
  }
  EXPECT_EQ(current_recorder(), nullptr);
  const int before = mover_->dropped_storages;
  (void)(x_ * 2).exp().tanh();
  EXPECT_EQ(mover_->dropped_storages, before) << "no hook is left";
}

TEST_F(RecorderTest, HandlesOutliveTheRecorder) {
  auto pass = recorder();
  at::Tensor y;
  {
    const RecorderGuard guard(pass.get());
    const OffloadScope scope("block");
    y = (x_ * 2).exp();
  }
  pass->finish();
  pass.reset();
  EXPECT_TRUE(at::equal(torch::autograd::grad({y.sum()}, {x_})[0], (x_ * 2).exp().detach() * 2));
  y = at::Tensor();
  EXPECT_EQ(mover_->dropped_storages, 1);
}

}  // namespace
}  // namespace sidestream
