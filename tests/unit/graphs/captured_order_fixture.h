#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/pipeline_order.h"
#include "unit/graphs/called_stack.h"

namespace sidestream::testing_model {

/// The second of four ranks: of six microbatches, three are in flight.
class CapturedOrderTest : public testing::Test {
 protected:
  static constexpr std::int64_t kLayers = 4;
  static constexpr std::int64_t kMicrobatches = 6;
  static constexpr std::int64_t kInFlight = 3;

  [[nodiscard]] Options options() const {
    return Options(device_).min_bytes(256).graph("layers.*").offload("layers.*.*").check_steps(4);
  }
  /// Runs `runs`, which may differ from the order that the engine is told.
  StepTensors run(CalledStack& model, OffloadEngine* engine, const std::vector<PipelineStep>& runs,
                  std::int64_t s) const {
    struct InFlight {
      at::Tensor input;
      at::Tensor output;
    };
    std::map<std::int64_t, InFlight> in_flight;
    std::vector<at::Tensor> given;
    for (const PipelineStep& work : runs) {
      InFlight& microbatch = in_flight[work.microbatch];
      if (work.kind == PipelineStep::Kind::forward) {
        const at::Tensor data = rows(s * kMicrobatches + work.microbatch, device_);
        microbatch.input = (work.microbatch == short_ ? data.slice(0, 0, 8).clone() : data).requires_grad_();
        const std::optional<Chunk> chunk = chunk_of(engine, {work.stage, work.microbatch});
        if (calls_in_vain_) {
          (void)model.run_layer(0, microbatch.input);
        }
        microbatch.output = model.forward(microbatch.input);
      } else if (work.kind == PipelineStep::Kind::weight_gradients) {
        if (engine != nullptr) {
          engine->backward_dw({work.stage, work.microbatch});
        }
      } else {
        microbatch.output.square().mean().backward();
        given.push_back(microbatch.input.grad());
        in_flight.erase(work.microbatch);
      }
    }
    return values(given);
  }
  /// A step that runs `runs`. `told`: the order that the engine is given; null for none.
  void expect_plain_step(OffloadEngine& engine, std::int64_t s, const std::vector<PipelineStep>& runs,
                         const std::vector<PipelineStep>* told) {
    expect_same_step(model_, nullptr, plain_, s, [&](CalledStack& model) {
      if (&model == &plain_) {
        return run(model, nullptr, runs, s);
      }
      Step step = told != nullptr ? engine.step(*told) : engine.step();
      StepTensors given = run(model, &engine, runs, s);
      step.finish();
      return given;
    });
  }
  void expect_plain_steps(OffloadEngine& engine, std::int64_t first, std::int64_t last) {
    for (std::int64_t s = first; s < last; ++s) {
      expect_plain_step(engine, s, order_, &order_);
    }
    EXPECT_EQ(engine.report().order_findings, std::vector<std::string>());
  }
  /// What happens in one more step.
  Report step_of(OffloadEngine& engine, std::int64_t s) {
    const Report before = engine.report();
    expect_plain_steps(engine, s, s + 1);
    Report after = engine.report();
    after.eager_calls -= before.eager_calls;
    return after;
  }
  void expect_all_replay(OffloadEngine& engine, std::int64_t s) {
    const Report report = step_of(engine, s);
    EXPECT_EQ(report.replays, graphs_of_call_ * kLayers * kMicrobatches);
    EXPECT_EQ(report.eager_calls, 0);
  }

  std::int64_t graphs_of_call_ = 2;
  std::int64_t short_ = -1;     ///< a microbatch with fewer rows
  bool calls_in_vain_ = false;  ///< each chunk calls its first layer once more, and drops the output
  c10::Device device_ = find_device("sim");
  CalledStack model_{device_, {}, kLayers};
  CalledStack plain_{device_, {}, kLayers};
  std::vector<PipelineStep> order_ = pipeline_order(PipelineShape{4, 1, kMicrobatches}, 1);
};

}  // namespace sidestream::testing_model
