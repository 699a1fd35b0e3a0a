// What waits for a capture, and what its warm-up holds, on the device.
#include <cstdint>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "eventually.h"
#include "graphs/outputs/storage_holders.h"
#include "models/body_model.h"
#include "models/plain_twin.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "unit/graphs/called_stack.h"

namespace sidestream::testing_model {
namespace {

class CaptureMemoryTest : public testing::Test {
 protected:
  [[nodiscard]] bool falls_to(std::int64_t bytes) const {
    return eventually([&] { return memory_use(device_).allocated <= bytes; });
  }

  c10::Device device_ = find_device("sim");
};

TEST_F(CaptureMemoryTest, AWarmUpHoldsAnOutputUntilItsLastReaderOnly) {
  torch::nn::Sequential model = layer_stack(12, device_);
  std::int64_t first = 0;
  std::int64_t begun = 0;
  const auto options = Options(device_).min_bytes(1024).progress([&](const Progress& progress) {
    if (progress.phase == ProgressPhase::warm_up && progress.index == 1) {
      await_end_of_backward(device_);
      first = memory_use(device_).allocated;
    } else if (progress.phase == ProgressPhase::warm_up && progress.index > 1) {
      ++begun;
      EXPECT_TRUE(falls_to(first)) << progress.name;
    }
  });
  OffloadEngine engine(*model, options);
  const auto layers = graph_stack(engine, model, device_, GraphOptions().num_warmup_iters(1));
  EXPECT_EQ(begun, 10);
}

/// Attention's backward makes views of saved tensors, which are no leaves although no node has made them.
TEST_F(CaptureMemoryTest, ACaptureHoldsNoTensorOfThePassesBeforeIt) {
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> scores;
  const auto attention = [&](BodyBlock& block, const at::Tensor& x) {
    const at::Tensor h = at::matmul(x, block.weight);
    const at::Tensor weights = at::softmax(at::matmul(h, h.transpose(1, 2)), -1);
    scores.emplace_back(weights.storage().getWeakStorageImpl());
    return x + at::matmul(weights, h);
  };
  BodyModel model(device_, {attention, attention});
  OffloadEngine engine(model, Options(device_).min_bytes(256).graph("blocks.*").offload("blocks.*"));
  for (std::int64_t s = 0; s < 3; ++s) {
    (void)model.step(&engine, s);
  }
  EXPECT_EQ(engine.report().replays, 4);
  EXPECT_GT(scores.size(), 4U);
  for (const auto& of_pass : scores) {
    EXPECT_TRUE(eventually([&] { return of_pass.expired(); }));
  }
}

/// Each call's input is made between the calls, so that none is another call's output.
struct Glued : CalledStack {
  explicit Glued(c10::Device device) : CalledStack(device, {}, 6) {}
  at::Tensor loss(const at::Tensor& x) {
    at::Tensor h = x;
    for (std::size_t i = 0; i < layers->size(); ++i) {
      h = run_layer(i, h * 2);
    }
    return h.mean();
  }
};

TEST_F(CaptureMemoryTest, CallsThatWaitForTheirCaptureHoldNothingOfTheDevice) {
  Glued plain(device_);
  Glued mine(device_);
  OffloadEngine engine(mine, Options(device_).graph("layers.*"));
  const auto expect_plain = [&](std::int64_t s) {
    expect_same_step(mine, &engine, plain, s, [&](Glued& model) { model.loss(rows(s, device_)).backward(); });
  };
  synchronize(device_);
  std::int64_t with_gradients = memory_use(device_).allocated;
  expect_plain(0);
  for (const Glued* model : {&plain, &mine}) {
    for (const at::Tensor& parameter : model->parameters()) {
      const std::size_t bytes = parameter.grad().defined() ? parameter.grad().nbytes() : 0;
      with_gradients += static_cast<std::int64_t>((bytes + 511) / 512 * 512);
    }
  }
  // Less, where another test's last tensors were let go of in between: autograd's thread does so a moment later.
  EXPECT_TRUE(falls_to(with_gradients));
  for (std::int64_t s = 1; s < 4; ++s) {
    expect_plain(s);
  }
  EXPECT_EQ(engine.report().captures, 12);
}

TEST_F(CaptureMemoryTest, ACaptureInTheirPlaceLetsGoOfTheOldGraphsMemoryFirst) {
  Glued model(device_);
  std::int64_t at_begin = 0;  // of the first capture
  bool fell = false;
  const auto options = Options(device_).graph("layers.*").progress([&](const Progress& progress) {
    if (progress.phase == ProgressPhase::warm_up && progress.index == 0) {
      // Its samples: what the graphs were given last, [16, 32] floats a layer.
      const std::int64_t samples = 6 * 16 * 32 * 4;
      if (at_begin == 0) {
        at_begin = memory_use(device_).allocated;
      } else {
        fell = falls_to(at_begin + samples);
      }
    }
  });
  OffloadEngine engine(model, options);
  for (std::int64_t s = 0; s < 4; ++s) {
    if (s == 3) {
      relocate(model);
    }
    (void)train_step(model, &engine, [&] { model.loss(rows(s, device_)).backward(); });
  }
  EXPECT_EQ(engine.report().recaptures, 6);
  EXPECT_TRUE(fell);
}

}  // namespace
}  // namespace sidestream::testing_model
