// Engines on both of two GPUs in one process: gradients of plain training bit for bit, and nothing unordered.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <c10/cuda/CUDAFunctions.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "gpu/gpu_blocks.h"
#include "models/block_model.h"
#include "models/plain_twin.h"
#include "models/wrapping.h"
#include "sidestream/call.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/report.h"
#include "sidestream/stays.h"
#include "threads/at_once.h"

namespace sidestream::testing_model {
namespace {

constexpr std::int64_t kBatch = 4;
constexpr std::int64_t kSequence = 64;
constexpr std::int64_t kHidden = 128;

/// Blocks that lie on one GPU.
struct Part : torch::nn::Module {
  explicit Part(c10::Device device) : positions(at::zeros({kSequence, kHidden})) {
    for (std::int64_t i = 0; i < 3; ++i) {
      blocks->push_back(std::make_shared<Block>(kHidden, 4, 0.0));
    }
    register_module("blocks", blocks);
    positions = register_buffer("positions", positions);
    to(device);
  }
  at::Tensor forward(at::Tensor h) {
    for (const auto& block : *blocks) {
      h = call(block->as<Block>(), h, stays(&positions), std::int64_t{0});
    }
    return h;
  }
  torch::nn::ModuleList blocks;
  at::Tensor positions;
};

/// A model whose first half lies on one GPU and whose second half on the other.
struct Halves : torch::nn::Module {
  explicit Halves(const std::vector<c10::Device>& devices) {
    torch::manual_seed(5);
    first = register_module("first", std::make_shared<Part>(devices[0]));
    second = register_module("second", std::make_shared<Part>(devices[1]));
  }
  std::shared_ptr<Part> first, second;
};

class TwoGpus : public gpu::GpuBlocks {
 protected:
  void SetUp() override {
    gpu::GpuBlocks::SetUp();
    if (!IsSkipped() && c10::cuda::device_count() < 2) {
      GTEST_SKIP() << "this needs two GPUs";
    }
  }

  [[nodiscard]] static at::Tensor input(std::int64_t step, c10::Device device) {
    const at::Tensor numbers = at::arange(kBatch * kSequence * kHidden, at::kFloat).view({kBatch, kSequence, kHidden});
    return (numbers * 0.37 + static_cast<double>(step)).sin().to(device);
  }

  const std::vector<c10::Device> devices_ = {c10::Device(c10::kCUDA, 0), c10::Device(c10::kCUDA, 1)};
};

class TwoGpusTest : public TwoGpus, public testing::WithParamInterface<Wrapping> {
 protected:
  [[nodiscard]] Options options(c10::Device device) const {
    return GetParam().options(device, 4096).check_steps(kSteps);
  }
  void expect_ordered(const OffloadEngine& engine) const {
    const Report report = engine.report();
    EXPECT_GT(report.checked_operations, 100);
    EXPECT_EQ(report.order_findings, std::vector<std::string>());
    EXPECT_GT(report.offloaded_bytes, 0);
    EXPECT_EQ(report.replays > 0, !GetParam().graph.empty());
  }
};

TEST_P(TwoGpusTest, AThreadForEachGpuTrainsAsPlain) {
  test::at_once(2, [&](int number) {
    const c10::Device device = devices_[static_cast<std::size_t>(number)];
    Part mine(device);
    Part plain(device);
    {
      const at::NoGradGuard no_grad;
      const auto values = mine.parameters();
      const auto copies = plain.parameters();
      for (std::size_t i = 0; i < values.size(); ++i) {
        copies[i].copy_(values[i]);
      }
    }
    for (int round = 0; round < 3; ++round) {
      OffloadEngine engine(mine, options(device));
      for (std::int64_t s = 0; s < kSteps; ++s) {
        expect_same_step(mine, &engine, plain, s,
                         [&](Part& part) { part.forward(input(s, device)).square().mean().backward(); });
      }
      expect_ordered(engine);
    }
  });
}

TEST_P(TwoGpusTest, AModelOverBothTrainsAsPlainWithAnEngineOnEach) {
  Halves mine(devices_);
  Halves plain(devices_);
  OffloadEngine first(*mine.first, options(devices_[0]));
  OffloadEngine second(*mine.second, options(devices_[1]));
  for (std::int64_t s = 0; s < kSteps; ++s) {
    expect_same_step(mine, nullptr, plain, s, [&](Halves& model) {
      const bool engines = &model == &mine;
      std::optional<Step> of_first;
      std::optional<Step> of_second;
      if (engines) {
        of_first.emplace(first.step());
      }
      const at::Tensor h = model.first->forward(input(s, devices_[0])).to(devices_[1], /*non_blocking=*/true);
      if (engines) {
        of_second.emplace(second.step());
      }
      model.second->forward(h).square().mean().backward();
      if (engines) {
        of_second->finish();
        of_first->finish();
      }
    });
  }
  expect_ordered(first);
  expect_ordered(second);
}

TEST_P(TwoGpusTest, WhatLiesOnTheOtherGpuStaysAndTrainsAsPlain) {
  Halves mine(devices_);
  Halves plain(devices_);
  Wrapping wrapping = GetParam();
  wrapping.offload = "**";
  wrapping.graph = wrapping.graph.empty() ? "" : "first.blocks.*";
  OffloadEngine engine(mine, wrapping.options(devices_[0], 4096).check_steps(kSteps));
  for (std::int64_t s = 0; s < kSteps; ++s) {
    expect_same_step(mine, &engine, plain, s, [&](Halves& model) {
      model.second->forward(model.first->forward(input(s, devices_[0])).to(devices_[1])).square().mean().backward();
    });
  }
  expect_ordered(engine);
  for (const GroupReport& group : engine.report().groups) {
    EXPECT_NE(group.name.rfind("second.", 0), 0U) << group.name;
  }
}

TEST_F(TwoGpus, AGraphedCallOnTheOtherGpuIsAnErrorThatNamesIt) {
  Halves mine(devices_);
  Halves plain(devices_);
  OffloadEngine engine(mine, Options(devices_[0]).graph("second.blocks.*"));
  const auto train = [&](OffloadEngine* of, Halves& model) {
    return train_step(model, of, [&] {
      model.second->forward(model.first->forward(input(0, devices_[0])).to(devices_[1])).square().mean().backward();
    });
  };
  const StepTensors expected = train(nullptr, plain);
  EXPECT_TRUE(same(train(&engine, mine), expected));
  const std::string message = message_of<UsageError>([&] { train(&engine, mine); });
  EXPECT_NE(message.find("\"second.blocks.0\": input 0"), std::string::npos) << message;
  EXPECT_NE(message.find("is on cuda:1, but its graphs run on cuda:0"), std::string::npos) << message;
}

INSTANTIATE_TEST_SUITE_P(Wrapped, TwoGpusTest,
                         testing::Values(Wrapping{"eager", "", "blocks.*.*"},
                                         Wrapping{"graphs_1", "blocks.*", "blocks.*.*", 1},
                                         Wrapping{"graphs_2_accumulating", "blocks.*", "blocks.*.*", 2, true}),
                         [](const testing::TestParamInfo<Wrapping>& info) { return info.param.name; });

}  // namespace
}  // namespace sidestream::testing_model
