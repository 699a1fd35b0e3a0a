#pragma once
#include <cstdint>
#include <functional>

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include "models/block_model.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"

namespace sidestream::testing_model {

/// The model and its plain twin; steps of both on the same new data.
class CallTest : public testing::Test {
 protected:
  using Run = std::function<void(BlockModel& model, std::int64_t s)>;

  CallTest() {
    model_.to(device_);
    plain_.to(device_);
  }

  [[nodiscard]] Options options(const GraphOptions& graph = {}) const {
    return Options(device_).min_bytes(1024).graph("blocks.*").offload("blocks.*.*").graph_options(graph);
  }

  /// Forward and backward on the data of step `s`.
  void train(BlockModel& model, std::int64_t s, std::int64_t start = 0) const {
    const auto batch = batch_of(model.shape(), s, device_);
    model.loss(batch.tokens, batch.targets, start).backward();
  }

  /// `run` in a step of the engine and plainly: the same gradients.
  void expect_plain(OffloadEngine& engine, std::int64_t s, const Run& run) {
    testing_model::expect_plain(
        s, s + 1, [&](std::int64_t step) { return train_step(model_, &engine, [&] { run(model_, step); }); },
        [&](std::int64_t step) { return train_step(plain_, nullptr, [&] { run(plain_, step); }); });
  }
  void expect_plain(OffloadEngine& engine, std::int64_t first, std::int64_t last, std::int64_t start = 0) {
    for (std::int64_t s = first; s < last; ++s) {
      expect_plain(engine, s, [&](BlockModel& model, std::int64_t step) { train(model, step, start); });
    }
  }

  c10::Device device_ = find_device("sim");
  BlockModel model_{BlockModel::Shape{}};
  BlockModel plain_{BlockModel::Shape{}};
  at::Tensor positions_ = model_.named_buffers()["positions"];
  at::Tensor plain_positions_ = plain_.named_buffers()["positions"];
};

}  // namespace sidestream::testing_model
