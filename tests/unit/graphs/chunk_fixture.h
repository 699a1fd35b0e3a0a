#pragma once
#include <cstdint>
#include <optional>

#include <gtest/gtest.h>

#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "unit/graphs/called_stack.h"

namespace sidestream::testing_model {

class ChunkTest : public testing::Test {
 protected:
  ChunkTest() {
    in_step(&engine_, [&] { model_.forward(rows(0, device_)).square().mean().backward(); });
  }
  [[nodiscard]] Options options() const {
    return Options(device_).min_bytes(256).graph("layers.*").offload("layers.*.*").check_steps(8);
  }
  /// A step of the engine that a bad chunk has been part of gives plain gradients.
  void expect_usable(OffloadEngine& engine) {
    for (std::int64_t s = 20; s < 23; ++s) {
      expect_same_step(model_, nullptr, plain_, s, [&](CalledStack& model) {
        std::optional<Step> step;
        std::optional<Chunk> chunk;
        if (&model == &model_) {
          step.emplace(engine.step());
          chunk.emplace(engine.chunk({0, 0}));
        }
        model.forward(rows(s, device_)).square().mean().backward();
        chunk.reset();
        step.reset();
      });
    }
  }

  c10::Device device_ = find_device("sim");
  CalledStack model_{device_};
  CalledStack plain_{device_};
  OffloadEngine engine_{model_, options()};  // has had one step
};

}  // namespace sidestream::testing_model
