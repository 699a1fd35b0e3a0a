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

  /// `run` in a step of the engine and plainly: the same gradients.
  void expect_plain(OffloadEngine& engine, std::int64_t s, const Run& run) {
    expect_same_step(model_, &engine, plain_, s, [&](BlockModel& model) { run(model, s); });
  }
  void expect_plain(OffloadEngine& engine, std::int64_t first, std::int64_t last, std::int64_t start = 0) {
    for (std::int64_t s = first; s < last; ++s) {
      expect_plain(engine, s, [&](BlockModel& model, std::int64_t step) { model.loss_of(step, start).backward(); });
    }
  }

  c10::Device device_ = find_device("sim");
  BlockModel model_{BlockModel::Shape{}};
  BlockModel plain_{BlockModel::Shape{}};
  at::Tensor positions_ = model_.named_buffers()["positions"];
  at::Tensor plain_positions_ = plain_.named_buffers()["positions"];
};

}  // namespace sidestream::testing_model
