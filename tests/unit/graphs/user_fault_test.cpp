// User code throws, or makes a call that a capture cannot hold, at the n-th visit of each place, for every n up to the end of
// some steps: in sizing, warm-up, capture and replay, forward, backward and hooks. The user's exception comes out as it is, a
// broken rule of captures as a CaptureError that names the call, and the engine trains on with the right gradients.
#include <atomic>
#include <cstdio>
#include <functional>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>

#include "offload/autograd_engine.h"
#include "sidestream/error.h"
#include "unit/graphs/trapped_training.h"
#include "warnings.h"

namespace sidestream {
namespace {

using testing_model::ModelBroke;
using testing_model::Trap;
using testing_model::TrappedTraining;
using testing_model::Wrapping;
using Place = Trap::Place;

class UserFaultTest : public TrappedTraining {
 protected:
  /// How often a fault came out of which part of an engine's life.
  struct Outcomes {
    int tried = 0;
    int sizing = 0;
    int capture = 0;
    int replay = 0;
  };

  /// Arms the trap at every visit in turn. `expect` is given what came out (null for nothing) once the trap was sprung.
  Outcomes every_visit(Place place, const std::function<void()>& act,
                       const std::function<void(const std::exception*, const std::string&)>& expect,
                       Trap** trap = nullptr) {
    const bool hooks = place == Place::parameter_hook || place == Place::post_accumulate_hook;
    const std::int64_t live = sim_->live_handles();
    Outcomes outcomes;
    for (std::int64_t n = 0; !HasFailure(); ++n) {
      {
        Subject subject(*this, hooks);
        if (trap != nullptr) {
          *trap = &subject.trap;
        }
        subject.trap.arm(place, n, act);
        for (std::int64_t s = 0; s < kSteps && !subject.trap.sprung(); ++s) {
          bool began = false;
          const std::string at = name_of(place) + std::string(", visit ") + std::to_string(n);
          try {
            train(subject, s, began);
            if (subject.trap.sprung()) {
              expect(nullptr, at);
            }
          } catch (const std::exception& error) {
            expect(&error, at);
            ++(s == 0 ? outcomes.sizing : began ? outcomes.replay : outcomes.capture);
          }
          EXPECT_EQ(subject.broken(), "") << at;
        }
        if (!subject.trap.sprung()) {
          break;
        }
        ++outcomes.tried;
        expect_usable(subject, name_of(place) + std::string(", visit ") + std::to_string(n));
        const std::int64_t graphed = GetParam().graph.empty() ? 0 : GetParam().name == "mixed" ? 2 : kLayers;
        EXPECT_EQ(subject.engine.report().captures, 2 * graphed) << name_of(place) << ", visit " << n;
      }
      EXPECT_EQ(sim_->live_handles(), live) << name_of(place) << ", visit " << n;
    }
    return outcomes;
  }

  void print(const char* what, Place place, const Outcomes& outcomes) const {
    std::printf("%s in %s | %s | %d | thrown: sizing step %d, warm-up and capture %d, later %d; all clean\n", what,
                name_of(place), GetParam().name.c_str(), outcomes.tried, outcomes.sizing, outcomes.capture,
                outcomes.replay);
  }
};

TEST_P(UserFaultTest, AnExceptionPassesUnchanged) {
  for (int p = 0; p <= static_cast<int>(Place::progress); ++p) {
    const auto place = static_cast<Place>(p);
    if (GetParam().accumulate && (place == Place::parameter_hook || place == Place::post_accumulate_hook)) {
      continue;  // refused: such graphs would not run them
    }
    const bool of_graphs = place == Place::pre_warmup_hook || place == Place::post_warmup_hook;
    const auto outcomes = every_visit(
        place, [p] { throw ModelBroke(p); },
        [&](const std::exception* error, const std::string& at) {
          const auto* broke = dynamic_cast<const ModelBroke*>(error);
          EXPECT_TRUE(broke != nullptr && broke->number() == p)
              << at << ": " << (error != nullptr ? error->what() : "nothing was thrown");
        });
    EXPECT_TRUE(outcomes.tried > 0 || (of_graphs && GetParam().graph.empty())) << name_of(place);
    print("a throw", place, outcomes);
  }
}

TEST_P(UserFaultTest, ACallThatWaitsIsRefusedInACaptureOnly) {
  testing_model::ExpectedWarnings warnings;  // of scopes that end in a capture that has failed by then
  const std::pair<const char*, std::function<void()>> calls[] = {
      {"item()", [&] { EXPECT_EQ(at::ones({1}, device_).item<float>(), 1.0F); }},
      {"a stream's synchronize", [&] { sim_->synchronize(sim_->current_stream()); }},
      {"the device's synchronize", [&] { sim_->synchronize_device(); }},
      {"a swallowed item()",
       [&] {
         try {
           (void)at::ones({1}, device_).item<float>();
         } catch (const std::exception&) {
         }
       }},
  };
  for (const auto& [name, call] : calls) {
    for (const Place place : {Place::in_nested_scope, Place::custom_backward}) {
      std::atomic<bool> captures{false};
      const auto outcomes = every_visit(
          place,
          [&, call = call] {
            captures = sim_->capture_status(sim_->current_stream()) != CaptureStatus::none;
            call();
          },
          [&](const std::exception* error, const std::string& at) {
            if (!captures) {
              EXPECT_EQ(error, nullptr) << at << ": " << error->what();
              return;
            }
            const auto* refused = dynamic_cast<const CaptureError*>(error);
            ASSERT_NE(refused, nullptr) << at << ": " << (error != nullptr ? error->what() : "nothing was thrown");
            EXPECT_PRED_FORMAT2(testing::IsSubstring, "graphed call \"layers.", refused->what());
          });
      EXPECT_GT(outcomes.tried, 0) << name_of(place);
      EXPECT_EQ(outcomes.sizing + outcomes.replay, 0) << name_of(place);
      EXPECT_EQ(outcomes.capture > 0, !GetParam().graph.empty()) << name_of(place);
      print(name, place, outcomes);
    }
  }
}

TEST_P(UserFaultTest, ASavedTensorThatIsChangedIsNamed) {
  Trap* trap = nullptr;
  bool ours = false;
  const auto outcomes = every_visit(
      Place::in_scope,
      [&] {
        ours = current_saved_tensor_source() != nullptr;  // in warm-up autograd keeps them, and looks itself
        const at::NoGradGuard no_grad;
        trap->saved().add_(1);
      },
      [&](const std::exception* error, const std::string& at) {
        ASSERT_NE(error, nullptr) << at;
        EXPECT_EQ(dynamic_cast<const UsageError*>(error) != nullptr, ours) << at << ": " << error->what();
        EXPECT_PRED_FORMAT2(testing::IsSubstring, ours ? ".mlp\", was changed in place" : "modified by an inplace",
                            error->what());
      },
      &trap);
  EXPECT_GT(outcomes.sizing, 0);
  EXPECT_EQ(outcomes.capture > 0, !GetParam().graph.empty());
  print("a saved tensor changed", Place::in_scope, outcomes);
}

INSTANTIATE_TEST_SUITE_P(Wrapped, UserFaultTest, testing_model::kTrappedWrappings,
                         [](const testing::TestParamInfo<Wrapping>& info) { return info.param.name; });

}  // namespace
}  // namespace sidestream
