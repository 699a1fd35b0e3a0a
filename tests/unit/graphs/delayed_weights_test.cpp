// GradientPolicy::delayed: weight gradients that backward_dw computes.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include "expect_throws.h"
#include "graphs/engine/engine_access.h"
#include "models/body_model.h"
#include "models/plain_twin.h"
#include "models/stack_twins.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "unit/graphs/called_stack.h"
#include "unit/graphs/delayed_weights_fixture.h"

namespace sidestream::testing_model {
namespace {

/// How many nodes of a graph come from an operator whose name holds `work`.
std::size_t count_nodes(const Runtime& runtime, const CapturedCall::OneGraph& graph, const std::string& work) {
  std::size_t count = 0;
  const std::size_t nodes = graph.graph ? runtime.nodes(graph.graph).size() : 0;
  for (std::size_t i = 0; i < nodes; ++i) {
    count += graph.names.of(i).work.find(work) != std::string_view::npos ? 1 : 0;
  }
  return count;
}

struct DelayedForm {
  const char* name;
  bool offload = true;
  bool linked = true;
  const char* delayed = "**";
  const char* accumulated = nullptr;
};

std::ostream& operator<<(std::ostream& out, const DelayedForm& form) { return out << form.name; }

class DelayedFormsTest : public DelayedCallablesTest, public testing::WithParamInterface<DelayedForm> {
 protected:
  void capture() {
    GraphOptions options = delayed(GetParam().delayed);
    if (GetParam().accumulated != nullptr) {
      options.gradients(GetParam().accumulated, GradientPolicy::accumulated);
    }
    Options engine = Options(device_).min_bytes(1024).check_steps(8);
    if (GetParam().offload) {
      engine.offload("layers.*.*");
    }
    stacks_.capture(engine, options, GetParam().linked);
  }
};

TEST_P(DelayedFormsTest, GivesPlainGradientsInAnyOrder) {
  capture();
  std::vector<std::size_t> order{0, 1, 2, 3};
  for (std::int64_t s = 0; s < 6; ++s) {
    expect_plain(s, [&] {
      if (s % 3 == 2) {
        compute_all();
        return;
      }
      for (const std::size_t layer : order) {
        if (calls()[layer].delays) {
          stacks_.layers[layer].backward_dw();
        }
      }
    });
    std::next_permutation(order.begin(), order.end());
  }
  EXPECT_EQ(stacks_.engine->report().order_findings, std::vector<std::string>());
}

INSTANTIATE_TEST_SUITE_P(Forms, DelayedFormsTest,
                         testing::Values(DelayedForm{"offloaded"}, DelayedForm{"unlinked", true, false},
                                         DelayedForm{"kept", false}, DelayedForm{"of_one_layer", true, true, "1.*"},
                                         DelayedForm{"beside_accumulated", true, true, "**", "2.*"}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_F(DelayedCallablesTest, IndicesThatTheBodyMakes) {
  const auto picks = [](BodyBlock& block, const at::Tensor& x) {
    const at::Tensor rows = at::arange(15, -1, -1, at::TensorOptions(at::kLong).device(x.device()));
    return x + at::matmul(x, block.weight.index_select(0, rows)).tanh();
  };
  BodyTwins twins(device_, {picks, picks});
  OffloadEngine engine(twins.mine,
                       Options(device_).min_bytes(256).graph("blocks.*").offload("blocks.*").graph_options(delayed()));
  for (std::int64_t s = 0; s < 4; ++s) {
    expect_same_step(twins.mine, &engine, twins.plain, s, [&](BodyModel& model) {
      (model.forward(model.data(s, 8, 2)) * model.data(s, 8, 2, 1)).sum().backward();
      if (&model == &twins.mine) {
        engine.backward_dw();
      }
    });
  }
  EXPECT_EQ(engine.report().replays, 6) << "three graphs of each call";
}

TEST_F(DelayedCallablesTest, ComputesEachProductOnce) {
  stacks_.capture(GraphOptions());
  const Runtime& runtime = EngineAccess::state(*stacks_.engine).runtime();
  std::vector<std::size_t> whole;
  for (const CapturedCall& call : calls()) {
    whole.push_back(count_nodes(runtime, call.backward, "mm"));
  }
  stacks_.capture(delayed());
  const Runtime& other = EngineAccess::state(*stacks_.engine).runtime();
  for (std::size_t i = 0; i < whole.size(); ++i) {
    const CapturedCall& call = calls()[i];
    EXPECT_EQ(count_nodes(other, call.weights, "mm"), 2U);  // one for each matrix
    EXPECT_EQ(count_nodes(other, call.backward, "mm") + 2, whole[i]);
  }
}

TEST_F(DelayedCallablesTest, AreComputedBetweenBackwardsOfOneSequence) {
  stacks_.capture(delayed(), /*linked=*/false);
  for (std::int64_t s = 0; s < 3; ++s) {
    const auto step = [&](bool graphed) {
      std::vector<at::Tensor> inputs;
      StepTensors all =
          train_step(graphed ? *stacks_.model : *stacks_.plain, graphed ? &*stacks_.engine : nullptr, [&] {
            std::vector<at::Tensor> outputs;
            for (std::size_t i = 0; i < 4; ++i) {
              inputs.push_back((i == 0 ? stacks_.input(s) : outputs[i - 1]).detach().requires_grad_(true));
              outputs.push_back(stacks_.run_layer(graphed, i, inputs[i]));
            }
            for (std::size_t i = 4; i-- > 0;) {
              outputs[i].backward(i == 3 ? rows(s, device_, 1) : inputs[i + 1].grad());
              if (graphed && i % 2 == 0) {  // of two layers
                stacks_.layers[i].backward_dw();
                stacks_.layers[i + 1].backward_dw();
              }
            }
          });
      all.emplace_back("gradient of the input", inputs[0].grad());
      return all;
    };
    const StepTensors plain = step(false);
    EXPECT_TRUE(same(step(true), plain)) << "step " << s;
  }
}

TEST_F(DelayedCallablesTest, AreVerified) {
  stacks_.capture(Options(device_).offload("layers.*.*").min_bytes(1024).verify_replays(1000), delayed());
  for (std::int64_t s = 0; s < 4; ++s) {  // one call a step is verified
    expect_plain(s, [&] { compute_all(); });
  }
  EXPECT_EQ(stacks_.engine->report().verified_backwards, 4);
}

TEST_F(DelayedCallablesTest, ReloadsWhatOnlyTheyReadAfterTheBackward) {
  stacks_.capture(Options(device_).offload("layers.*.*").min_bytes(1024).check_steps(8), delayed());
  std::uint64_t whole = 0;
  std::uint64_t for_weights = 0;
  for (const CapturedCall& call : calls()) {
    whole += call.copies.captured.bytes;
    for_weights += call.copies.captured.for_weights;
  }
  ASSERT_GT(for_weights, 0U);
  ASSERT_GT(whole, for_weights);
  std::size_t next = 2;
  while (calls()[next].copies.captured.for_weights == 0) {
    --next;
  }
  const GroupMover& mover = *EngineAccess::state(*stacks_.engine).resources().mover;
  for (std::int64_t s = 0; s < 3; ++s) {
    in_step(&*stacks_.engine, [&] {
      const auto reloaded = [&, before = mover.counts().reloaded_bytes] {
        return mover.counts().reloaded_bytes - before;
      };
      stacks_.loss(true, stacks_.input(s), s).backward();
      EXPECT_EQ(reloaded(), whole - for_weights);
      stacks_.layers[3].backward_dw();
      EXPECT_EQ(reloaded(), whole - for_weights + calls()[next].copies.captured.for_weights)
          << "the next one's is begun";
      compute_all();
      EXPECT_EQ(reloaded(), whole);
    });
  }
  EXPECT_EQ(stacks_.engine->report().order_findings, std::vector<std::string>());
}

TEST_F(DelayedCallablesTest, AReloadIsRepeatedIfAnotherGraphMayHaveUsedItsMemory) {
  stacks_.capture(Options(device_).offload("layers.{2,3}.*").min_bytes(1024).lag(0).check_steps(8), delayed());
  ASSERT_GT(calls()[2].copies.captured.for_weights, 0U);
  for (std::int64_t s = 0; s < 3; ++s) {
    expect_plain(s, [&] {
      for (const std::size_t layer :
           {3, 1, 2, 0}) {  // that of 2 is reloaded before the graph of 3, which is captured before it
        stacks_.layers[layer].backward_dw();
      }
    });
  }
  EXPECT_EQ(stacks_.engine->report().order_findings, std::vector<std::string>());
}

TEST_F(DelayedCallablesTest, ADroppedReloadIsInNobodysWay) {
  stacks_.capture(Options(device_).offload("layers.*.*").min_bytes(1024).check_steps(8), delayed());
  for (std::int64_t s = 0; s < 2; ++s) {
    expect_plain(2 * s, [&] { compute_all(); });
    EXPECT_THROWS(UsageError, "are delayed and were not computed", in_step(&*stacks_.engine, [&] {
                    stacks_.loss(true, stacks_.input(1), 1).backward();
                    stacks_.layers[3].backward_dw();  // the next one's reload begins before it
                  }));
    stacks_.model->zero_grad();
  }
  EXPECT_EQ(stacks_.engine->report().order_findings, std::vector<std::string>());
}

TEST_F(DelayedCallablesTest, AccumulatesOverMicrobatches) {
  stacks_.capture(delayed());
  for (std::int64_t s = 0; s < 3; ++s) {
    const auto step = [&](bool graphed) {
      return train_step(graphed ? *stacks_.model : *stacks_.plain, graphed ? &*stacks_.engine : nullptr, [&] {
        for (std::int64_t m = 0; m < 3; ++m) {
          stacks_.loss(graphed, stacks_.input(10 * s + m), s).backward();
          if (graphed) {
            compute_all();
          }
        }
      });
    };
    const StepTensors plain = step(false);
    EXPECT_TRUE(same(step(true), plain));
  }
}

TEST_F(DelayedCallablesTest, RunsHooksOfParametersInABackwardOfItsOwn) {
  stacks_.capture(delayed());
  const at::Tensor weight = stacks_.model->parameters().front();
  int hooks = 0;
  int callbacks = 0;
  const auto accumulator = torch::autograd::impl::grad_accumulator(weight);
  struct Counter final : torch::autograd::FunctionPostHook {
    std::function<void()> act;
    explicit Counter(std::function<void()> given) : act(std::move(given)) {}
    torch::autograd::variable_list operator()(const torch::autograd::variable_list& results,
                                              const torch::autograd::variable_list& /*grads*/) override {
      act();
      return results;
    }
  };
  accumulator->add_post_hook(std::make_unique<Counter>([&] {  // as c10d's Reducer has one
    ++hooks;
    torch::autograd::Engine::get_default_engine().queue_callback([&] { ++callbacks; });
  }));
  expect_plain(0, [&] {
    EXPECT_EQ(hooks, 0);
    EXPECT_FALSE(weight.grad().defined());
    compute_all();
    EXPECT_EQ(hooks, 1);
    EXPECT_EQ(callbacks, 1);
  });
}

TEST_F(DelayedCallablesTest, AHookMayComputeThoseOfItsOwnBackward) {
  stacks_.capture(delayed(), /*linked=*/false);
  for (const std::int64_t s : {0, 1}) {
    const auto step = [&](bool graphed) {
      return train_step(graphed ? *stacks_.model : *stacks_.plain, graphed ? &*stacks_.engine : nullptr, [&] {
        at::Tensor h = stacks_.run_layer(graphed, 1, stacks_.run_layer(graphed, 0, stacks_.input(s)));
        h.register_hook([&](const at::Tensor&) {
          if (graphed) {
            stacks_.layers[2].backward_dw();
            EXPECT_TRUE(stacks_.model->named_parameters()["2.fc1"].grad().defined());
          }
        });
        stacks_.run_layer(graphed, 2, h).sum().backward();
        if (graphed) {
          compute_all();
        }
      });
    };
    const StepTensors plain = step(false);
    EXPECT_TRUE(same(step(true), plain)) << "step " << s;
  }
}

/// Microbatches in flight of ss::call, in the order F0 F1 B0 F2 B1 W0 B2 W1 W2 or the like.
TEST(DelayedCallsTest, CapturesStayInFlightUntilTheWeightGradients) {
  const c10::Device device = find_device("sim");
  CalledStack model(device, {}, 6);
  CalledStack plain(device, {}, 6);
  OffloadEngine engine(
      model,
      Options(device).min_bytes(256).graph("layers.*").offload("layers.*.*").check_steps(8).graph_options(delayed()));
  std::int64_t eager = 0;
  for (std::int64_t s = 0; s < 5; ++s) {
    const auto step = [&](CalledStack& of, OffloadEngine* with) {
      return train_step(of, with, [&] {
        std::vector<at::Tensor> outputs;
        for (std::int64_t m = 0; m < 4; ++m) {
          outputs.push_back(of.forward(rows(10 * s + m, device)));
          if (m > 0) {
            (outputs[static_cast<std::size_t>(m) - 1] * rows(10 * s + m, device, 1)).mean().backward();
          }
          if (m == 2 && with != nullptr) {
            with->backward_dw();  // of two microbatches
          }
        }
        (outputs[3] * rows(10 * s + 4, device, 1)).mean().backward();
        if (with != nullptr) {
          with->backward_dw();
        }
      });
    };
    const StepTensors expected = step(plain, nullptr);
    EXPECT_TRUE(same(step(model, &engine), expected)) << "step " << s;
    EXPECT_TRUE(s == 0 || engine.report().eager_calls == eager) << "step " << s << " ran calls eagerly";
    eager = engine.report().eager_calls;
  }
  EXPECT_GT(engine.report().replays, 0);
  EXPECT_GT(engine.report().offloaded_bytes, 0);
  EXPECT_EQ(engine.report().order_findings, std::vector<std::string>());
}

}  // namespace
}  // namespace sidestream::testing_model
