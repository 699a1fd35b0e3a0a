#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include "graphs/engine/engine_access.h"
#include "models/plain_twin.h"
#include "models/trapped_model.h"
#include "models/wrapping.h"
#include "runtime/runtime.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "unit/graphs/engine_invariants.h"

namespace sidestream::testing_model {

/// A TrappedModel under an engine, with what plain training gives beside it.
class TrappedTraining : public testing::TestWithParam<Wrapping> {
 protected:
  static constexpr std::int64_t kLayers = 3;
  static constexpr std::int64_t kSteps = 4;  ///< sizing, capture and replay, two replays

  /// One model and its engine.
  struct Subject {
    Subject(const TrappedTraining& test, bool hooks);
    [[nodiscard]] std::string broken() const { return invariants.broken(EngineAccess::state(engine)); }

    Trap trap;
    TrappedModel model;
    EngineInvariants invariants;
    OffloadEngine engine;
  };

  /// What plain training gives: trained once for all tests.
  [[nodiscard]] static const std::vector<StepTensors>& plain_steps() {
    static const std::vector<StepTensors> all = [] {
      const c10::Device device = find_device("sim");
      Trap trap;
      TrappedModel plain(kLayers, trap);
      plain.to(device);
      std::vector<StepTensors> steps;
      for (std::int64_t s = 0; s < 2 * kSteps; ++s) {
        clear_gradients(plain);
        plain.loss(trapped_input(s, device)).backward();
        steps.push_back(gradients(plain));
      }
      return steps;
    }();
    return all;
  }

  [[nodiscard]] Options options(Trap& trap) const {
    Options options = GetParam().options(device_, 256);
    options.graph_options(GraphOptions(options.graph_options())
                              .num_warmup_iters(1)
                              .pre_warmup_hook([&trap] { trap.visit(Trap::Place::pre_warmup_hook); })
                              .post_warmup_hook([&trap] { trap.visit(Trap::Place::post_warmup_hook); }));
    options.progress([&trap](const Progress&) { trap.visit(Trap::Place::progress); });
    return options;
  }

  /// One step of the trainer. `began`: the engine's step was begun.
  void train(Subject& subject, std::int64_t s, bool& began) const {
    const at::Tensor x = trapped_input(s, device_);
    clear_gradients(subject.model);
    began = false;
    auto step = subject.engine.step();
    began = true;
    subject.model.loss(x).backward();
    step.finish();
  }

  /// Steps with new data give plain training's gradients, and leave nothing over.
  void expect_usable(Subject& subject, const std::string& after) const {
    for (std::int64_t s = kSteps; s < 2 * kSteps; ++s) {
      try {
        bool began = false;
        train(subject, s, began);
        EXPECT_TRUE(same(gradients(subject.model), expected_[s])) << "after " << after << ", step " << s;
      } catch (const std::exception& error) {
        ADD_FAILURE() << "after " << after << ", step " << s << ": " << error.what();
      }
    }
    EXPECT_EQ(subject.broken(), "") << "after " << after;
  }

  c10::Device device_ = find_device("sim");
  std::shared_ptr<Runtime> sim_ = make_runtime(device_);
  const std::vector<StepTensors>& expected_ = plain_steps();
};

inline TrappedTraining::Subject::Subject(const TrappedTraining& test, bool hooks)
    : model(kLayers, trap),
      invariants([&] {
        model.to(test.device_);
        if (hooks) {
          model.hook_parameters();
        }
        return EngineInvariants(test.sim_, model);
      }()),
      engine(model, test.options(trap)) {}

/// Eager, graphs on one and on two side streams, both kinds of layers in one model, and graphs that own the gradients.
inline const auto kTrappedWrappings =
    testing::Values(Wrapping{"eager", "", "first,layers.**"}, Wrapping{"graphs_1", "layers.*", "**", 1},
                    Wrapping{"graphs_2", "layers.*", "**", 2}, Wrapping{"mixed", "layers.0,layers.1", "**", 1},
                    Wrapping{"accumulate", "layers.*", "**", 2, true});

}  // namespace sidestream::testing_model
