// One callable for several shapes, which share memory.
#include "sidestream/bucketed_callables.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "graphs/engine/engine_access.h"
#include "models/plain_twin.h"
#include "sidestream/error.h"
#include "sidestream/testing/simulator.h"
#include "unit/graphs/bucketed_stack.h"
#include "warnings.h"

namespace sidestream::testing_model {
namespace {

using BucketedCallablesTest = BucketedStack;

TEST_F(BucketedCallablesTest, StepsOfAnyBucketGiveThePlainGradients) {
  std::int64_t s = 0;
  for (const char* schedule : {"early", "late", "d2h-late", "seed:1", "seed:2"}) {
    SCOPED_TRACE(schedule);
    const std::int64_t captures = engine_.report().captures;
    set_schedule(device_, Schedule::parse(schedule));
    capture();
    EXPECT_EQ(engine_.report().captures - captures, 3 * kLayers * 2);
    ExpectedWarnings warnings;
    for (const std::int64_t length : {32, 8, 20, 20, 8, 32, 8}) {
      expect_plain(s++, length);
    }
    EXPECT_TRUE(warnings.take().empty()) << "each fits a bucket";
  }
}

TEST_F(BucketedCallablesTest, RelocatedWeightsAreCapturedAgainInThePool) {
  capture();
  std::int64_t s = 0;
  for (int i = 0; i < 2; ++i) {
    for (const std::int64_t length : {8, 32, 20, 8}) {
      expect_plain(s++, length);
    }
    relocate(*model_);
  }
  expect_plain(s, 32);
  EXPECT_GT(engine_.report().recaptures, 3 * kLayers);
}

TEST_F(BucketedCallablesTest, CallsThatRunEagerlyAreCountedWithTheirCause) {
  capture();
  const ExpectedWarnings warnings;
  std::int64_t before = 0;
  const auto eager = [&] {
    const std::int64_t now = engine_.report().eager_calls;
    return now - std::exchange(before, now);
  };
  const auto expect_note = [&](const std::string& text) {
    const std::vector<std::string> notes = engine_.report().notes;
    EXPECT_TRUE(std::any_of(notes.begin(), notes.end(), [&](const std::string& note) {
      return note.find(text) != std::string::npos;
    })) << text;
  };
  expect_plain(0, 32);
  EXPECT_EQ(eager(), 0);
  expect_plain(1, 12);
  expect_plain(2, 40);
  EXPECT_EQ(eager(), 2 * kLayers);
  expect_note("bucketed \"layers.0\" and 3 other calls ran eagerly 8 times with inputs that fit no bucket");
  {
    const at::Tensor pending = forward(true, data(3, 32).requires_grad_(true));
    forward(true, data(3, 8).requires_grad_(true)).sum().backward();
    pending.sum().backward();
  }
  EXPECT_EQ(eager(), kLayers);
  expect_note("ran eagerly 4 times while the backward of another capture");
  {
    const at::NoGradGuard no_grad;
    (void)forward(true, data(4, 8));
  }
  EXPECT_EQ(eager(), kLayers);
  model_->eval();
  forward(true, data(5, 8).requires_grad_(true)).sum().backward();
  EXPECT_EQ(eager(), kLayers);
  expect_note("ran eagerly 4 times because training flags or module options differ from the capture's");
}

TEST_F(BucketedCallablesTest, UnknownShapesAreRefusedByOption) {
  capture(BucketOptions().on_unknown_shape(OnUnknownShape::error));
  EXPECT_THROWS(UsageError, "its inputs fit none of the 3 buckets", (void)layers_[0]({data(0, 12)}));
  expect_plain(0, 8);
}

TEST_F(BucketedCallablesTest, ACallBesideAPendingOneOfItsBucketRunsEagerly) {
  ExpectedWarnings warnings;
  for (const std::vector<std::int64_t>& lengths : {std::vector<std::int64_t>{8, 32}, std::vector<std::int64_t>{8}}) {
    capture(BucketOptions().on_unknown_shape(OnUnknownShape::error), lengths);
    for (std::int64_t s = 0; s < 3; ++s) {
      expect_plain(s, [&](bool graphs) {
        const at::Tensor y = forward(graphs, data(s, 8).requires_grad_(true));
        const at::Tensor z = forward(graphs, data(s + 9, 8).requires_grad_(true));
        y.mean().backward();
        z.mean().backward();
        return StepTensors{};
      });
    }
  }
  EXPECT_TRUE(warnings.take().empty());
}

TEST_F(BucketedCallablesTest, WithoutGradientsTheyRunEagerly) {
  capture();
  const at::NoGradGuard no_grad;
  EXPECT_TRUE(at::equal(forward(true, data(0, 12)), plain_->forward(data(0, 12))));
}

TEST_F(BucketedCallablesTest, InEvalModeWithGradientsTheyRunEagerlyWhateverTheOptionsSay) {
  for (const OnUnknownShape unknown : {OnUnknownShape::eager, OnUnknownShape::error}) {
    capture(BucketOptions().on_unknown_shape(unknown));
    ExpectedWarnings warnings;
    model_->eval();
    plain_->eval();
    expect_plain(0, 32);
    expect_plain(1, 12);
    model_->train();
    plain_->train();
    expect_plain(2, 32);
    EXPECT_TRUE(warnings.take().empty());
  }
}

TEST_F(BucketedCallablesTest, AResetDropsAllBuckets) {
  capture();
  layers_[0].reset();
  layers_[0].reset();
  EXPECT_THROWS(UsageError, "replayed after reset", (void)layers_[0]({data(0, 8).requires_grad_(true)}));
  layers_.clear();
  EXPECT_EQ(EngineAccess::state(engine_).arena().stats().leased, 0U);
}

TEST_F(BucketedCallablesTest, InputsHaveNamesInEachBucket) {
  const auto body = owning([](const Tensors& in) { return Tensors{in[0] - 2 * in[1]}; });
  std::vector<std::vector<std::vector<Sample>>> samples;
  for (const std::int64_t length : {8, 32}) {
    samples.push_back({{data(0, length).requires_grad_(true), data(0, length)}});
  }
  const GraphedCallable call =
      make_bucketed_callables(engine_, {Callable("call", body).input_names({"x", "y"})}, samples)[0];
  ExpectedWarnings warnings;
  for (const std::int64_t length : {8, 32, 12}) {
    const at::Tensor x = data(1, length).requires_grad_(true);
    const at::Tensor y = data(2, length);
    const at::Tensor result = call.call({{"y", y}, {"x", x}})[0];
    EXPECT_TRUE(at::equal(result, x - 2 * y));
    result.sum().backward();
  }
  EXPECT_EQ(warnings.take().size(), 1U);
  EXPECT_THROWS(UsageError, "has no input \"z\"", (void)call.call({{"z", data(1, 8)}, {"x", data(1, 8)}}));
  EXPECT_THROWS(UsageError, "input \"y\" is missing", (void)call.call({{"x", data(1, 8)}}));
}

TEST_F(BucketedCallablesTest, NoBucketIsRefused) {
  EXPECT_THROWS(UsageError, "at least one bucket of samples", (void)make_bucketed_callables(engine_, {}, {}));
}

}  // namespace
}  // namespace sidestream::testing_model
