// A model whose step needs more than twice the device's memory trains from the first step on, in each form, with the gradients of
// a run that has memory enough.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <regex>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

#include "expect_throws.h"
#include "models/plain_twin.h"
#include "runtime/runtime.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/report.h"
#include "sidestream/testing/simulator.h"
#include "warnings.h"

namespace sidestream::testing_model {
namespace {

/// Saves much more than it gives out.
class DeepBlock : public torch::nn::Module {
 public:
  DeepBlock() {
    auto generator = at::detail::createCPUGenerator(7);
    weight_ = register_parameter("weight", at::randn({kWidth, kWidth}, generator).mul_(0.05));
  }
  at::Tensor forward(at::Tensor h) {
    at::Tensor x = h.matmul(weight_);
    for (int i = 0; i < 10; ++i) {
      x = x.mul(0.5).tanh();
      x = x.sigmoid().exp();
    }
    return h + x;
  }
  static constexpr std::int64_t kWidth = 128;

 private:
  at::Tensor weight_;
};

class DeepModel : public torch::nn::Module {
 public:
  explicit DeepModel(c10::Device device) {
    for (std::int64_t i = 0; i < kLayers; ++i) {
      blocks->push_back(DeepBlock());
    }
    register_module("blocks", blocks);
    to(device);
  }
  at::Tensor loss(at::Tensor h) {
    for (auto& block : *blocks) {
      h = call(block->as<DeepBlock>(), h);
    }
    return h.square().mean();
  }
  static constexpr std::int64_t kLayers = 12;

  torch::nn::ModuleList blocks;
};

class MemoryLimitTest : public testing::Test {
 protected:
  static constexpr std::int64_t kSteps = 4;

  /// The device has so many bytes, while it lives.
  struct MemoryLimit {
    MemoryLimit(c10::Device sim, std::size_t bytes) : device(sim) {
      release_cached_memory(device);
      set_memory_limit(device, bytes);
    }
    MemoryLimit(const MemoryLimit&) = delete;
    MemoryLimit& operator=(const MemoryLimit&) = delete;
    ~MemoryLimit() { set_memory_limit(device, std::numeric_limits<std::size_t>::max()); }
    c10::Device device;
  };

  /// Once for all tests: what plain training gives, and a limit below half of what it reserves.
  void SetUp() override {
    if (limit_ > 0) {
      return;
    }
    DeepModel plain(device_);
    synchronize(device_);
    release_cached_memory(device_);
    reset_memory_peaks(device_);
    for (std::int64_t s = 0; s < kSteps; ++s) {
      expected_.push_back(step(plain, nullptr, s));
    }
    // Weights and gradients in it as well.
    limit_ = static_cast<std::size_t>(static_cast<double>(memory_use(device_).reserved_peak) / 2.2);
  }

  [[nodiscard]] at::Tensor data(std::int64_t s, std::int64_t rows = 256) const {
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(900 + s));
    return at::randn({rows, DeepBlock::kWidth}, generator).to(device_);
  }
  StepTensors step(DeepModel& model, OffloadEngine* engine, std::int64_t s) const {
    return train_step(model, engine, [&] { model.loss(data(s)).backward(); });
  }
  [[nodiscard]] Options options() const {
    return Options(device_).min_bytes(1024).graph_options(GraphOptions().side_streams(1).num_warmup_iters(1));
  }
  /// All steps are within the limit, with the right gradients.
  void expect_trains(const Options& options) {
    DeepModel model(device_);
    const MemoryLimit limit(device_, limit_);
    reset_memory_peaks(device_);
    OffloadEngine engine(model, options);
    for (std::int64_t s = 0; s < kSteps; ++s) {
      EXPECT_TRUE(same(step(model, &engine, s), expected_[static_cast<std::size_t>(s)])) << "step " << s;
      EXPECT_LE(memory_use(device_).reserved_peak, static_cast<std::int64_t>(limit_)) << "step " << s;
    }
    EXPECT_GT(engine.report().sizing_peak_bytes, 2 * static_cast<std::int64_t>(limit_));
  }

  c10::Device device_ = find_device("sim");
  inline static std::vector<StepTensors> expected_;
  inline static std::size_t limit_ = 0;
};

TEST_F(MemoryLimitTest, WithoutOffloadTheStepDoesNotFit) {
  DeepModel model(device_);
  const MemoryLimit limit(device_, limit_);
  EXPECT_THROWS(DeviceError, "out of memory", (void)step(model, nullptr, 0));
}

TEST_F(MemoryLimitTest, AStepThatDoesNotFitSaysWhatHeldTheMemoryAndTrainsOnceThereIsMore) {
  DeepModel model(device_);
  OffloadEngine engine(model, options().offload("head"));
  {
    const MemoryLimit limit(device_, limit_);
    ExpectedWarnings warnings;
    EXPECT_THROWS(DeviceError, "out of memory", (void)step(model, &engine, 0));
    const std::vector<std::string> texts = warnings.take();
    ASSERT_EQ(texts.size(), 1U);
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "the device ran out of memory in a step", texts[0]);
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "0.0 MiB are offloaded", texts[0]);
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "stay on the device: blocks.* ", texts[0]);
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "offload \"blocks.*\" as well", texts[0]);
  }
  EXPECT_TRUE(same(step(model, &engine, 0), expected_[0]));
}

TEST_F(MemoryLimitTest, ACaptureThatDoesNotFitSaysSo) {
  DeepModel model(device_);
  OffloadEngine engine(model, options().graph("blocks.*"));
  (void)step(model, &engine, 0);  // it has memory enough
  {
    const MemoryLimit limit(device_, limit_);
    const std::string text = message_of<DeviceError>([&] { (void)step(model, &engine, 1); });
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "sim device: out of memory", text);
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "the device ran out of memory in a capture. The capture began with",
                        text);
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "\"blocks.0\" and the calls after it needed at least ", text);
    EXPECT_PRED_FORMAT2(testing::IsSubstring, " bytes, but ", text);
    EXPECT_PRED_FORMAT2(testing::IsSubstring, " were free: at least ", text);
    EXPECT_PRED_FORMAT2(testing::IsSubstring,
                        " too few. Of the tensors that autograd saved, 0.0 MiB are offloaded and ", text);
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "To fit, offload \"blocks.*\" as well", text);
  }
  EXPECT_TRUE(same(step(model, &engine, 1), expected_[1]));
}

TEST_F(MemoryLimitTest, ACaptureThatDoesNotFitAsPlannedIsMadeAgainWithMoreOffloaded) {
  // With so much lag everything is needed immediately: nothing would be offloaded.
  const Options planned = options().offload("blocks.*").graph("blocks.*").lag(std::size_t{1} << 30);
  expect_trains(planned);
  DeepModel model(device_);
  const MemoryLimit limit(device_, limit_);
  OffloadEngine engine(model, planned);
  (void)step(model, &engine, 0);
  (void)step(model, &engine, 1);
  const Report report = engine.report();
  EXPECT_GT(report.offloaded_bytes, 0);
  EXPECT_TRUE(std::any_of(report.notes.begin(), report.notes.end(), [](const std::string& note) {
    return note.find("device memory ran out while \"blocks.0\"") != std::string::npos;
  }));
}

TEST_F(MemoryLimitTest, ACaptureThatFitsInNoFormSaysByHowMuch) {
  DeepModel model(device_);
  OffloadEngine engine(model, options().offload("blocks.*").graph("blocks.*"));
  (void)step(model, &engine, 0);
  {
    release_cached_memory(device_);
    constexpr std::size_t kMiB = std::size_t{1} << 20;
    const auto there = static_cast<std::size_t>(memory_use(device_).reserved);
    const MemoryLimit limit(device_, there + 3 * kMiB);
    const std::string text = message_of<DeviceError>([&] { (void)step(model, &engine, 1); });
    const std::regex lack(
        "\"blocks.0\" and the calls after it needed at least (\\d+) bytes, but (\\d+) were free: at least (\\d+) too "
        "few");
    std::smatch found;
    ASSERT_TRUE(std::regex_search(text, found, lack)) << text;
    const auto wanted = std::stoll(found[1]);
    const auto free = std::stoll(found[2]);
    EXPECT_EQ(wanted - free, std::stoll(found[3]));
    EXPECT_GT(wanted, free);
    EXPECT_LE(free, static_cast<std::int64_t>(there + 3 * kMiB));
    EXPECT_EQ(text.find('\n'), std::string::npos);
  }
  EXPECT_TRUE(same(step(model, &engine, 1), expected_[1]));
}

/// Behind the blocks comes what takes much more than they give out, and no name covers.
class WideHead {
 public:
  static at::Tensor loss(DeepModel& model, at::Tensor h) {
    for (auto& block : *model.blocks) {
      h = call(block->as<DeepBlock>(), h);
    }
    return h.repeat({kRows / h.size(0), 1}).mul(0.5).mul(0.5).square().mean();
  }
  static constexpr std::int64_t kRows = 24576;  // 12 MiB
};

TEST_F(MemoryLimitTest, ACaptureLeavesWhatTheRestOfAStepNeeds) {
  // With so much lag everything is needed immediately: the pool holds all, and nothing is offloaded.
  const Options planned = options().offload("blocks.*").graph("blocks.*").lag(std::size_t{1} << 30);
  const auto trained = [&](DeepModel& model, OffloadEngine* engine, std::int64_t s) {
    constexpr std::int64_t kInput = 512;  // without offload the blocks take more than the head
    return train_step(model, engine, [&] { WideHead::loss(model, data(s, kInput)).backward(); });
  };
  std::vector<StepTensors> expected;
  std::size_t captured = 0;
  std::size_t stepped = 0;
  {
    DeepModel plain(device_);
    for (std::int64_t s = 0; s < kSteps; ++s) {
      expected.push_back(trained(plain, nullptr, s));
    }
    DeepModel model(device_);
    OffloadEngine engine(model, planned);
    (void)trained(model, &engine, 0);
    release_cached_memory(device_);
    reset_memory_peaks(device_);
    { auto captures = engine.step(); }
    captured = static_cast<std::size_t>(memory_use(device_).reserved_peak);
    (void)trained(model, &engine, 1);
    stepped = static_cast<std::size_t>(memory_use(device_).reserved_peak);
  }
  ASSERT_GT(stepped, captured + (std::size_t{16} << 20)) << "the head takes more than captures do";
  DeepModel model(device_);
  const MemoryLimit limit(device_,
                          captured + (std::size_t{4} << 20));  // the captures fit, the head beside their pool does not
  OffloadEngine engine(model, planned);
  for (std::int64_t s = 0; s < kSteps; ++s) {
    EXPECT_TRUE(same(trained(model, &engine, s), expected[static_cast<std::size_t>(s)])) << "step " << s;
  }
  EXPECT_GT(engine.report().offloaded_bytes, 0);
}

TEST_F(MemoryLimitTest, WhatIsLeftForTheRestOfAStepIsToldWhereItIsTooLittle) {
  const Options planned = options().graph("blocks.*");
  const auto trained = [&](DeepModel& model, OffloadEngine& engine, std::int64_t s) {
    return train_step(model, &engine, [&] { WideHead::loss(model, data(s)).backward(); });
  };
  DeepModel model(device_);
  OffloadEngine engine(model, planned);
  (void)trained(model, engine, 0);
  release_cached_memory(device_);
  reset_memory_peaks(device_);
  { auto captures = engine.step(); }
  const std::vector<std::string> before = engine.report().notes;
  EXPECT_FALSE(std::any_of(before.begin(), before.end(), [](const std::string& note) {
    return note.find("fewer than the rest of the first step took") != std::string::npos;
  }));
  const auto captured = static_cast<std::size_t>(memory_use(device_).reserved_peak);
  engine.reset();
  const MemoryLimit none(device_, std::numeric_limits<std::size_t>::max());
  (void)trained(model, engine, 0);
  const MemoryLimit limit(device_, captured + (std::size_t{4} << 20));
  { auto captures = engine.step(); }  // nothing else may leave: as well as can be
  const std::vector<std::string> notes = engine.report().notes;
  EXPECT_TRUE(std::any_of(notes.begin(), notes.end(), [](const std::string& note) {
    return note.find("fewer than the rest of the first step took") != std::string::npos;
  }));
}

TEST_F(MemoryLimitTest, TheReportTellsWhatGraphsTakeBesideTensors) {
  const std::shared_ptr<Runtime> runtime = make_runtime(device_);
  const std::int64_t before = runtime->room().outside;
  DeepModel model(device_);
  OffloadEngine engine(model, options().graph("blocks.*"));
  (void)step(model, &engine, 0);
  EXPECT_EQ(engine.report().graph_bytes, 0);
  (void)step(model, &engine, 1);
  EXPECT_GE(engine.report().graph_bytes, 2 * DeepModel::kLayers * 20 * 512) << "of twenty operators and more a layer";
  EXPECT_EQ(engine.report().graph_bytes, runtime->room().outside - before);
  EXPECT_EQ(engine.report().warm_up_bytes, 0);
  engine.reset();
  EXPECT_EQ(engine.report().graph_bytes, 0);
  EXPECT_EQ(runtime->room().outside, before);
}

TEST_F(MemoryLimitTest, ADeviceThatIsFullBeforeTheStepIsATypedError) {
  DeepModel model(device_);
  OffloadEngine engine(model, options().offload("blocks.*").graph("blocks.*"));
  {
    const MemoryLimit limit(device_, 0);  // below the weights, which are there
    ExpectedWarnings warnings;
    EXPECT_THROWS(DeviceError, "out of memory", (void)step(model, &engine, 0));
  }
  for (std::int64_t s = 0; s < 2; ++s) {
    EXPECT_TRUE(same(step(model, &engine, s), expected_[static_cast<std::size_t>(s)])) << "step " << s;
  }
}

TEST_F(MemoryLimitTest, EagerOffloadTrainsFromTheFirstStep) { expect_trains(options().offload("blocks.*")); }

TEST_F(MemoryLimitTest, GraphedCallsTrainFromTheFirstStep) {
  expect_trains(options().offload("blocks.*").graph("blocks.*"));
}

TEST_F(MemoryLimitTest, GraphedCallablesTrainFromTheFirstStep) {
  DeepModel model(device_);
  const MemoryLimit limit(device_, limit_);
  OffloadEngine engine(model, options().offload("blocks.*"));
  std::vector<Callable> callables;
  std::vector<std::vector<Sample>> samples;
  for (std::int64_t i = 0; i < DeepModel::kLayers; ++i) {
    callables.emplace_back(
        "blocks." + std::to_string(i),
        [](DeepBlock& block, const Tensors& in) { return Tensors{block.forward(in[0])}; },
        std::dynamic_pointer_cast<DeepBlock>(model.blocks[static_cast<std::size_t>(i)]));
    samples.push_back({i == 0 ? Sample(data(50)) : Sample::output_of(i - 1)});
  }
  const auto layers =
      make_graphed_callables(engine, callables, samples, GraphOptions().side_streams(1).num_warmup_iters(1));
  for (std::int64_t s = 0; s < kSteps; ++s) {
    const StepTensors mine = train_step(model, &engine, [&] {
      at::Tensor h = data(s);
      for (const auto& layer : layers) {
        h = layer({h})[0];
      }
      h.square().mean().backward();
    });
    EXPECT_TRUE(same(mine, expected_[static_cast<std::size_t>(s)])) << "step " << s;
  }
}

TEST_F(MemoryLimitTest, RelocatedWeightsAreCapturedAgainWithinIt) {
  DeepModel model(device_);
  const MemoryLimit limit(device_, limit_);
  OffloadEngine engine(model, options().offload("blocks.*").graph("blocks.*"));
  for (std::int64_t s = 0; s < kSteps; ++s) {
    relocate(model);
    EXPECT_TRUE(same(step(model, &engine, s), expected_[static_cast<std::size_t>(s)])) << "step " << s;
  }
  EXPECT_EQ(engine.report().recaptures, 2 * DeepModel::kLayers);
}

}  // namespace
}  // namespace sidestream::testing_model
