// Shapes that bucketed callables meet and capture: when, how many, and what is dropped for them.
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "expect_throws.h"
#include "graphs/engine/engine_access.h"
#include "models/plain_twin.h"
#include "sidestream/error.h"
#include "sidestream/graph_pool.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/report.h"
#include "unit/graphs/bucketed_stack.h"
#include "unit/sim/rerun/every_order.h"
#include "warnings.h"

namespace sidestream::testing_model {
namespace {

class CapturedBucketsTest : public BucketedStack {
 protected:
  static BucketOptions capturing() { return BucketOptions().on_unknown_shape(OnUnknownShape::capture); }
  static constexpr std::int64_t kBucket = 2 * kLayers;  ///< graphs of one

  void SetUp() override { options_ = capturing(); }
  void capture_given(const std::vector<std::int64_t>& lengths = {8, 32}) {
    capture(options_, lengths);
    before_ = engine_.report().captures;
  }
  /// Buckets that were captured by calls.
  [[nodiscard]] std::int64_t captured() { return (engine_.report().captures - before_) / kBucket; }
  void expect_plain_of(const std::vector<std::int64_t>& lengths) {
    for (const std::int64_t length : lengths) {
      expect_plain(step_++, length);
    }
  }

  BucketOptions options_;
  std::int64_t before_ = 0;
  std::int64_t step_ = 0;
  ExpectedWarnings warnings_;
};

TEST_F(CapturedBucketsTest, WhatIsDroppedComesBack) {
  const sim::OneThread one_thread;  // autograd's own frees the last tensors of a backward a moment later
  options_.max_buckets(1);
  capture_given({32});
  const auto leased_now = [&] { return EngineAccess::state(engine_).arena().stats().leased; };
  const std::size_t leased = leased_now();
  expect_plain_of({8, 8});
  EXPECT_LT(leased_now(), leased);
  expect_plain_of({32, 32});
  release_cached_memory(device_);
  const MemoryUse use = memory_use(device_);
  const std::int64_t graphs = engine_.report().graph_bytes;
  for (int i = 0; i < 5; ++i) {
    expect_plain_of({8, 8, 32, 32});
  }
  EXPECT_EQ(captured(), 12);
  release_cached_memory(device_);
  EXPECT_EQ(memory_use(device_).allocated, use.allocated);
  EXPECT_EQ(memory_use(device_).reserved, use.reserved);
  EXPECT_EQ(leased_now(), leased);
  EXPECT_EQ(engine_.report().graph_bytes, graphs);
}

TEST_F(CapturedBucketsTest, ACapturedBucketTakesWhatAGivenOneTakes) {
  const sim::OneThread one_thread;  // autograd's own frees the last tensors of a backward a moment later
  const auto allocated = [&] {
    release_cached_memory(device_);
    return memory_use(device_).allocated;
  };
  capture_given({32, 12});
  expect_plain_of({12, 32});
  const std::int64_t given = allocated();
  layers_.clear();
  capture_given({32});
  expect_plain_of({12, 12, 32});
  EXPECT_EQ(captured(), 1);
  EXPECT_EQ(allocated(), given);
}

TEST_F(CapturedBucketsTest, WhereNoneMakesRoomOneMoreRunsEagerlyWithOneWarning) {
  options_.max_buckets(3).on_max_buckets(OnMaxCaptures::eager);
  capture_given();
  expect_plain_of({12, 12, 40, 40, 20, 12});
  EXPECT_EQ(captured(), 1);
  const std::vector<std::string> texts = warnings_.take();
  ASSERT_EQ(texts.size(), 1U);
  EXPECT_NE(texts[0].find("fit none of the 3 buckets, and BucketOptions::max_buckets allows no more"),
            std::string::npos);
}

TEST_F(CapturedBucketsTest, FewerThanTheSamplesAreRefused) {
  EXPECT_THROWS(UsageError, "max_buckets is 1, but there are 2 buckets of samples",
                capture(capturing().max_buckets(1), {8, 32}));
}

TEST_F(CapturedBucketsTest, NothingIsCapturedBesideAPendingBackward) {
  const auto pool = std::make_shared<GraphPool>(device_);
  options_.graph(GraphOptions().pool(pool));
  capture_given();
  const auto other = make_graphed_callables(
      engine_, {Callable("other", owning([](const Tensors& in) { return Tensors{in[0].exp()}; }))},
      {{data(0, 4).requires_grad_(true)}}, GraphOptions().pool(pool))[0];
  before_ = engine_.report().captures;
  expect_plain_of({12});
  const at::Tensor x = data(0, 4).requires_grad_(true);
  const at::Tensor pending = other({x})[0];
  expect_plain_of({12, 40, 8});
  EXPECT_EQ(captured(), 0);
  pending.sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), x.exp()));
  expect_plain_of({12, 12});
  EXPECT_EQ(captured(), 1);
}

TEST_F(CapturedBucketsTest, ABucketThatIsHeldOrInterruptedIsNotCaptured) {
  capture_given();
  (void)layers_[0]({data(0, 12).requires_grad_(true)});
  EXPECT_ANY_THROW((void)layers_[1]({at::ones({3, 5}, device_)}));
  (void)layers_[0]({data(0, 40).requires_grad_(true)});
  (void)layers_[1]({data(0, 40).requires_grad_(true)});
  expect_plain_of({8, 32, 8});
  EXPECT_EQ(captured(), 0);
  expect_plain_of({12, 12});
  EXPECT_EQ(captured(), 1);
}

TEST_F(CapturedBucketsTest, InEvalModeNothingIsCaptured) {
  capture_given();
  expect_plain_of({12});
  model_->eval();
  plain_->eval();
  expect_plain_of({12, 40, 40});
  EXPECT_EQ(captured(), 0);
  model_->train();
  plain_->train();
  expect_plain_of({12, 12});
  EXPECT_EQ(captured(), 1);
}

TEST_F(CapturedBucketsTest, AResetForgetsWhatWasToBeCaptured) {
  capture_given();
  expect_plain_of({12});
  layers_[3].reset();
  (void)layers_[0]({data(0, 12).requires_grad_(true)});
  EXPECT_EQ(captured(), 0);
  EXPECT_THROWS(UsageError, "replayed after reset", (void)layers_[3]({data(0, 12).requires_grad_(true)}));
}

TEST_F(CapturedBucketsTest, RanksAgree) {
  bool agreed = true;
  int asked = 0;
  options_.graph(GraphOptions().agree_to_capture([&](bool mine) {
    ++asked;
    return mine && agreed;
  }));
  capture_given();
  agreed = false;
  asked = 0;
  expect_plain_of({12, 12, 12});
  EXPECT_EQ(captured(), 0);
  EXPECT_EQ(asked, 2);
  agreed = true;
  expect_plain_of({12, 12});
  EXPECT_EQ(captured(), 1);
  EXPECT_EQ(asked, 3);
}

TEST_F(CapturedBucketsTest, ACaptureThatFailsComesOutOfTheCallAndLeavesTheOthers) {
  int passes = -1;  // until it throws; below 0: never
  const auto body = owning([&passes](const Tensors& in) {
    if (passes >= 0 && passes-- == 0) {
      throw std::runtime_error("the model broke");
    }
    return Tensors{in[0].exp()};
  });
  const GraphedCallable call =
      make_bucketed_callables(engine_, {Callable("call", body)}, {{{data(0, 8).requires_grad_(true)}}}, capturing())[0];
  const auto expect_exp = [&](std::int64_t length) {
    const at::Tensor x = data(0, length).requires_grad_(true);
    const at::Tensor y = call({x})[0];
    EXPECT_TRUE(at::equal(y, x.exp()));
    y.sum().backward();
    EXPECT_TRUE(at::equal(x.grad(), x.exp()));
  };
  expect_exp(12);
  passes = 2;
  EXPECT_THROWS(std::runtime_error, "the model broke", expect_exp(12));
  expect_exp(8);
  expect_exp(12);
  expect_exp(12);
  EXPECT_EQ(EngineAccess::state(engine_).sequences().all().size(), 2U);
}

/// The arguments of callables in a pass that becomes a bucket.
class RecordedPassTest : public CapturedBucketsTest {
 protected:
  at::Tensor of(std::int64_t s, std::int64_t length) { return data(s, length).requires_grad_(true); }
  void make(const TensorFunction& second, const std::vector<Sample>& samples) {
    const auto first = owning([](const Tensors& in) { return Tensors{in[0].exp()}; });
    calls_ = make_bucketed_callables(engine_, {Callable("first", first), Callable("second", owning(second))},
                                     {{{of(0, 8)}, samples}}, options_);
    before_ = engine_.report().captures;
  }
  void expect_captured_and_replayed() {
    EXPECT_EQ(engine_.report().captures - before_, 4) << "one bucket";
    EXPECT_EQ(engine_.report().eager_calls, 2) << "the recorded pass";
    EXPECT_TRUE(warnings_.take().empty());
  }

  std::vector<GraphedCallable> calls_;
};

TEST_F(RecordedPassTest, TakesInACallableWhoseInputsFitABucket) {
  make([](const Tensors& in) { return Tensors{in[0].tanh()}; }, {of(0, 4)});
  for (std::int64_t i = 0; i < 3; ++i) {
    const at::Tensor x = of(i, 12);
    const at::Tensor y = of(i, 4);
    calls_[0]({x})[0].sum().backward();
    calls_[1]({y})[0].sum().backward();
    EXPECT_TRUE(at::equal(x.grad(), x.exp()));
    EXPECT_TRUE(at::equal(y.grad(), torch::autograd::grad({y.tanh().sum()}, {y})[0]));
  }
  expect_captured_and_replayed();
}

TEST_F(RecordedPassTest, AnArgumentThatNoSampleLinksTakesAnyTensorLater) {
  make([](const Tensors& in) { return Tensors{in[0].tanh()}; }, {of(0, 8)});
  for (std::int64_t i = 0; i < 3; ++i) {
    const at::Tensor x = of(i, 12);
    const at::Tensor other = of(i + 7, 12);
    const at::Tensor h = calls_[0]({x})[0];
    const at::Tensor& given = i < 2 ? h : other;
    EXPECT_TRUE(at::equal(calls_[1]({given})[0], given.tanh()));
  }
  expect_captured_and_replayed();
}

TEST_F(RecordedPassTest, OneTensorGivenTwiceIsCapturedAsTwo) {
  make([](const Tensors& in) { return Tensors{in[0] * in[1].exp()}; }, {of(0, 8), of(0, 8)});
  for (std::int64_t i = 0; i < 3; ++i) {
    (void)calls_[0]({of(i, 12)});
    const at::Tensor x = of(i, 12);
    const at::Tensor y = i == 0 ? x : of(i + 7, 12);
    const at::Tensor plain_x = x.detach().requires_grad_(true);
    const at::Tensor plain_y = i == 0 ? plain_x : y.detach().requires_grad_(true);
    calls_[1]({x, y})[0].sum().backward();
    (plain_x * plain_y.exp()).sum().backward();
    EXPECT_TRUE(at::equal(x.grad(), plain_x.grad()));
    EXPECT_TRUE(at::equal(y.grad(), plain_y.grad()));
  }
  expect_captured_and_replayed();
}

/// Two callables of which the second takes a mask, whose shape alone may be new.
class MaskedBucketsTest : public CapturedBucketsTest {
 protected:
  void SetUp() override {
    CapturedBucketsTest::SetUp();
    const auto first = owning([](const Tensors& in) { return Tensors{in[0].tanh()}; });
    const auto second = owning(
        [](const Tensors& in) { return Tensors{in[1].defined() ? (in[0].unsqueeze(0) * in[1]).sum() : in[0].sum()}; });
    calls_ = make_bucketed_callables(
        engine_, {Callable("first", first), Callable("second", second)},
        {{{data(0, 8).requires_grad_(true)}, {Sample::output_of(0), at::ones({2, 8, kHidden}, device_)}}}, options_);
    before_ = engine_.report().captures;
  }
  void TearDown() override { at::autocast::set_autocast_enabled(device_.type(), false); }
  /// `autocast`: the forwards run in a region of it.
  void expect_right(const at::Tensor& x, const at::Tensor& mask, bool autocast = false) {
    const auto gradient = [&](const at::Tensor& loss) {
      at::autocast::set_autocast_enabled(device_.type(), false);
      return torch::autograd::grad({loss}, {x})[0];
    };
    const at::Tensor h = x.tanh();
    const at::Tensor plain = gradient(mask.defined() ? (h.unsqueeze(0) * mask).sum() : h.sum());
    at::autocast::set_autocast_enabled(device_.type(), autocast);
    EXPECT_TRUE(at::equal(gradient(calls_[1]({calls_[0]({x})[0], mask})[0]), plain));
  }
  [[nodiscard]] std::int64_t graphs() { return engine_.report().captures - before_; }

  std::vector<GraphedCallable> calls_;
};

TEST_F(MaskedBucketsTest, ANewShapeOfALaterCallableAloneRunsEagerlyWithOneWarning) {
  const at::Tensor x = data(1, 8).requires_grad_(true);
  for (const std::int64_t masks : {3, 3, 2, 4, 3}) {
    expect_right(x, at::full({masks, 8, kHidden}, 0.5, device_));
  }
  EXPECT_EQ(graphs(), 0);
  const std::vector<std::string> texts = warnings_.take();
  ASSERT_EQ(texts.size(), 1U);
  EXPECT_NE(texts[0].find("The first callable decides which bucket a pass uses"), std::string::npos);
}

TEST_F(MaskedBucketsTest, UndefinedArgumentsAreShapesToo) {
  const at::Tensor x = data(1, 12).requires_grad_(true);
  for (int i = 0; i < 3; ++i) {
    expect_right(x, at::Tensor());
  }
  EXPECT_EQ(graphs(), 4);
}

TEST_F(MaskedBucketsTest, AnArgumentThatIsNoOutputIsCapturedAsItsOwn) {
  const at::Tensor h = data(1, 12).requires_grad_(true);
  for (int i = 0; i < 3; ++i) {
    const at::Tensor x = data(2, 12).requires_grad_(true);
    const at::Tensor y = calls_[0]({x})[0];
    torch::autograd::grad({calls_[1]({h, at::Tensor()})[0]}, {h});
    EXPECT_TRUE(at::equal(torch::autograd::grad({y.sum()}, {x})[0], torch::autograd::grad({x.tanh().sum()}, {x})[0]));
  }
  EXPECT_EQ(graphs(), 4);
  EXPECT_TRUE(warnings_.take().empty()) << "the second fits where it is captured";
}

TEST_F(MaskedBucketsTest, APassIsCapturedInItsOwnStateOfAutocastAlone) {
  const at::Tensor x = data(1, 12).requires_grad_(true);
  expect_right(x, at::Tensor());
  expect_right(x, at::Tensor(), /*autocast=*/true);
  expect_right(data(1, 20).requires_grad_(true), at::Tensor(), /*autocast=*/true);
  EXPECT_EQ(graphs(), 0);
  expect_right(x, at::Tensor());
  expect_right(x, at::Tensor());
  EXPECT_EQ(graphs(), 4);
}

TEST_F(MaskedBucketsTest, UnderAutocastLeavesAndOthersAreCapturedApart) {
  const at::Tensor leaf = data(1, 12).requires_grad_(true);
  for (int i = 0; i < 5; ++i) {
    expect_right(leaf.view_as(leaf), at::Tensor(), /*autocast=*/true);
  }
  EXPECT_EQ(graphs(), 4);
  for (int i = 0; i < 5; ++i) {
    expect_right(leaf, at::Tensor(), /*autocast=*/true);
  }
  EXPECT_EQ(graphs(), 8);
}

}  // namespace
}  // namespace sidestream::testing_model
