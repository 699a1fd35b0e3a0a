// Engines of several threads in one process, on the simulated device: captures of one do not break the other.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>

#include "models/block_model.h"
#include "models/layer_stack.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graph_pool.h"
#include "sidestream/graphed_callable.h"
#include "threads/at_once.h"

namespace sidestream::testing_model {
namespace {

/// One thread's model, engine and plain twin.
struct Trainer {
  Trainer(c10::Device device, const Options& options, const BlockModel::Shape& shape = {})
      : model(shape), plain(shape) {
    model.to(device);
    plain.to(device);
    engine = std::make_unique<OffloadEngine>(model, options);
  }
  void expect_plain(std::int64_t first, std::int64_t last) {
    for (std::int64_t s = first; s < last; ++s) {
      expect_same_step(model, &*engine, plain, s, [&](BlockModel& of) { of.loss_of(s).backward(); });
    }
  }

  BlockModel model;
  BlockModel plain;
  std::unique_ptr<OffloadEngine> engine;
};

class TwoEnginesTest : public testing::Test {
 protected:
  [[nodiscard]] Options options() const {
    return Options(device_)
        .min_bytes(1024)
        .graph("blocks.*")
        .offload("blocks.*.*")
        .graph_options(GraphOptions().num_warmup_iters(1));
  }
  [[nodiscard]] Options visited_options() const {
    return Options(device_).min_bytes(1024).graph("visited").graph_options(GraphOptions().num_warmup_iters(1));
  }
  /// `work` on a thread of its own while the calling one runs `meanwhile`; again and again until that is done.
  static void beside(const std::function<void()>& work, const std::function<void()>& meanwhile) {
    std::atomic<bool> done{false};
    std::thread other([&] {
      try {
        while (!done.load()) {
          work();
          std::this_thread::yield();
        }
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
    });
    try {
      meanwhile();
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what();
    }
    done.store(true);
    other.join();
  }

  c10::Device device_ = find_device("sim");
};

TEST_F(TwoEnginesTest, ThreadsThatCaptureAtOnceTrainAsPlain) {
  Trainer trainers[] = {{device_, options()}, {device_, options()}};
  test::at_once(2, [&](int number) {
    Trainer& trainer = trainers[number];
    for (std::int64_t round = 0; round < 3; ++round) {
      trainer.expect_plain(10 * number + 4 * round, 10 * number + 4 * round + 4);
      EXPECT_EQ(trainer.engine->report().replays, 8) << "thread " << number;
      trainer.engine->reset();
    }
  });
}

void four_rounds(Trainer& trainer) {
  for (std::int64_t round = 0; round < 4; ++round) {
    trainer.expect_plain(4 * round, 4 * round + 4);
    trainer.engine->reset();
  }
}

TEST_F(TwoEnginesTest, EnginesComeAndGoWhileAnotherCaptures) {
  Trainer trainer(device_, options());
  Trainer passing(device_, options());  // which seeds, as all that fill their weights with random numbers
  beside(
      [&] {
        passing.engine = std::make_unique<OffloadEngine>(passing.model, options());
        passing.expect_plain(100, 103);
      },
      [&] { four_rounds(trainer); });
  EXPECT_EQ(trainer.engine->report().captures, 4 * 8);
}

TEST_F(TwoEnginesTest, SynchronizingFromAnotherThreadWaitsForTheCapture) {
  Trainer trainer(device_, options());
  beside(
      [&] {
        synchronize(device_);
        release_cached_memory(device_);
      },
      [&] { four_rounds(trainer); });
}

/// Numbers that one thread draws while the other captures come once, and none is refused.
TEST_F(TwoEnginesTest, WhatAnotherThreadDrawsWhileGraphsAreCapturedComesOnce) {
  BlockModel::Shape shape;
  shape.dropout = 0.25;
  Trainer trainer(device_, options(), shape);
  std::set<std::int64_t> drawn;
  std::int64_t draws = 0;
  beside(
      [&] {
        const at::Tensor numbers =
            at::randint(std::int64_t{1} << 60, {1}, at::TensorOptions().dtype(at::kLong).device(device_));
        drawn.insert(numbers.cpu().item<std::int64_t>());
        ++draws;
      },
      [&] {
        for (std::int64_t round = 0; round < 4; ++round) {
          for (std::int64_t s = 0; s < 3; ++s) {
            (void)train_step(trainer.model, trainer.engine.get(), [&] { trainer.model.loss_of(s).backward(); });
          }
          trainer.engine->reset();
        }
      });
  EXPECT_EQ(static_cast<std::int64_t>(drawn.size()), draws);
}

TEST_F(TwoEnginesTest, ThreadsWithDropoutCaptureAndReplayAtOnce) {
  BlockModel::Shape shape;
  shape.dropout = 0.25;
  Trainer trainers[] = {{device_, options(), shape}, {device_, options(), shape}};
  test::at_once(2, [&](int number) {
    Trainer& trainer = trainers[number];
    for (std::int64_t round = 0; round < 3; ++round) {
      for (std::int64_t s = 0; s < 4; ++s) {
        EXPECT_NO_THROW((void)train_step(trainer.model, trainer.engine.get(),
                                         [&] { trainer.model.loss_of(number + s).backward(); }));
      }
      trainer.engine->reset();
    }
    EXPECT_GT(trainer.engine->report().replays, 0);
  });
}

/// The replay has the pool, and waits for the end of the capture because it draws; so the capture may not wait for the pool.
TEST_F(TwoEnginesTest, AReplayThatDrawsLetsAnotherThreadCaptureInItsPool) {
  const auto pool = std::make_shared<GraphPool>(device_);
  torch::nn::Sequential models[] = {layer_stack(1, device_), layer_stack(1, device_)};
  OffloadEngine first(*models[0], Options(device_));
  OffloadEngine second(*models[1], Options(device_));
  const auto graphed = [&](OffloadEngine& engine, const torch::nn::Sequential& model, std::function<void()> before) {
    const auto body = [](torch::nn::SequentialImpl& of, const Tensors& inputs) {
      return Tensors{at::dropout(of.forward(inputs[0]), 0.5, /*train=*/true)};
    };
    return make_graphed_callables(engine, {Callable("call", body, model)}, {{rows(0, device_)}},
                                  GraphOptions().pool(pool).pre_warmup_hook(std::move(before)))[0];
  };
  const GraphedCallable replayed = graphed(first, models[0], {});
  std::atomic<bool> capturing{false};
  std::thread other([&] {
    while (!capturing.load()) {
      std::this_thread::yield();
    }
    EXPECT_NO_THROW(replayed({rows(1, device_)})[0].sum().backward());
  });
  EXPECT_NO_THROW((void)graphed(second, models[1], [&] {
    capturing.store(true);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // meanwhile the other thread gets to its launch
  }));
  other.join();
}

/// Runs `forward` in its forward, and adds nothing.
class Visiting : public torch::nn::Module {
 public:
  explicit Visiting(std::function<void(int)> visit) : visit_(std::move(visit)) {
    weight_ = register_parameter("weight", at::ones({8, 8}));
  }
  at::Tensor forward(const at::Tensor& x) {
    visit_(++visits_);
    return at::mm(x, weight_).tanh();
  }

 private:
  std::function<void(int)> visit_;
  int visits_ = 0;
  at::Tensor weight_;
};

class VisitedModel : public torch::nn::Module {
 public:
  explicit VisitedModel(std::function<void(int)> visit)
      : visited(register_module("visited", std::make_shared<Visiting>(std::move(visit)))) {}
  std::shared_ptr<Visiting> visited;
};

/// Draws in its backward.
struct NoisyGradient : torch::autograd::Function<NoisyGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) { return x * 2; }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* /*context*/,
                                               torch::autograd::tensor_list grads) {
    return {grads[0] + at::rand_like(grads[0])};
  }
};

/// A backward inside of a backward that adds into a leaf, as a checkpoint of the trainer's own.
struct NestedBackward : torch::autograd::Function<NestedBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x * 2;
  }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext* context,
                                               torch::autograd::tensor_list grads) {
    const at::AutoGradMode with_grad(true);
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_(true);
    (x * 2).backward(grads[0]);
    return {x.grad()};
  }
};

/// What `work` throws on a thread of its own; empty: nothing.
std::string message_on_a_thread(const std::function<void()>& work) {
  std::string message;
  std::thread([&] {
    const at::AutoGradMode with_grad(true);
    try {
      work();
    } catch (const UsageError& error) {
      message = std::string("UsageError: ") + error.what();
    } catch (const std::exception& error) {
      message = std::string("another exception: ") + error.what();
    }
  }).join();
  return message;
}

/// Trains a visited model through its captures; `visit` gets the number of the pass: 1 sizes the step, 2 the sequence, 3 warms up, 4
/// is captured.
void train_visited(const Options& options, const std::function<void(int)>& visit) {
  const c10::Device device = options.device();
  VisitedModel model(visit);
  model.to(device);
  OffloadEngine engine(model, options);
  for (int s = 0; s < 3; ++s) {
    const auto step = engine.step();
    call(model.visited, at::ones({8, 8}, at::TensorOptions().device(device)).requires_grad_(true)).sum().backward();
  }
  EXPECT_EQ(engine.report().captures, 2);
  EXPECT_EQ(engine.report().replays, 2);
}

TEST_F(TwoEnginesTest, ABackwardInsideABackwardOfAnotherThreadIsNotRefused) {
  std::vector<std::string> messages;
  const at::Tensor on_device = at::ones({4}, at::TensorOptions().device(device_));
  train_visited(visited_options(), [&](int /*pass*/) {
    for (const at::Tensor& leaf : {at::ones({4}), on_device}) {
      messages.push_back(message_on_a_thread([&] {
        const at::Tensor x = leaf.detach().clone().requires_grad_(true);
        NestedBackward::apply(x).sum().backward();
        EXPECT_TRUE(at::equal(x.grad().cpu(), at::full({4}, 2.0)));
      }));
    }
  });
  EXPECT_EQ(messages, std::vector<std::string>(8, ""));
}

TEST_F(TwoEnginesTest, ABackwardOfAnotherThreadThatDrawsIsRefusedByNameWhileAGraphIsCaptured) {
  std::vector<std::string> messages;
  train_visited(visited_options(), [&](int /*pass*/) {
    messages.push_back(message_on_a_thread([&] {
      const at::Tensor x = at::ones({4}, at::TensorOptions().device(device_)).requires_grad_(true);
      NoisyGradient::apply(x).sum().backward();
    }));
  });
  ASSERT_EQ(messages.size(), 4U);
  for (const int pass : {0, 1, 2}) {
    EXPECT_EQ(messages[pass], "");
  }
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "UsageError: ", messages[3]);
  EXPECT_PRED_FORMAT2(testing::IsSubstring,
                      "random numbers are drawn from a generator that a running capture uses alone", messages[3]);
}

/// A backward does not wait, as an operator does not that began before anything could hold it: they draw in the middle of it.
TEST_F(TwoEnginesTest, WhatIsDrawnInTheMiddleOfAWarmUpComesOnceAndCountsForNothing) {
  at::Generator generator = at::globalContext().defaultGenerator(device_);
  const auto noise = [&] {
    const at::Tensor x = at::zeros({4}, at::TensorOptions().device(device_)).requires_grad_(true);
    NoisyGradient::apply(x).sum().backward();
    const at::Tensor drawn = x.grad().cpu();
    return std::vector<float>(drawn.const_data_ptr<float>(), drawn.const_data_ptr<float>() + 4);
  };
  std::vector<std::vector<float>> drawn;
  at::Tensor before;
  at::Tensor after;
  for (int engine = 0; engine < 2; ++engine) {
    train_visited(visited_options(), [&](int pass) {
      if (pass == 1) {
        before = generator.get_state();
      } else if (pass < 4) {
        EXPECT_EQ(message_on_a_thread([&] { drawn.push_back(noise()); }), "");
      }
    });
    after = generator.get_state();
    EXPECT_TRUE(at::equal(before, after));
    for (int i = 0; i < 2; ++i) {
      drawn.push_back(noise());
    }
  }
  EXPECT_EQ(drawn.size(), 8U);
  EXPECT_EQ(std::set<std::vector<float>>(drawn.begin(), drawn.end()).size(), drawn.size())
      << testing::PrintToString(drawn);
}

TEST_F(TwoEnginesTest, ASeedThatAnotherThreadSetsInTheMiddleOfAWarmUpHolds) {
  constexpr std::uint64_t kSeed = 77;
  const auto draw = [&] { return at::rand({4}, at::TensorOptions().device(device_)).cpu(); };
  torch::manual_seed(kSeed);
  const at::Tensor expected = draw();
  at::Tensor apart;
  for (int engine = 0; engine < 2; ++engine) {
    torch::manual_seed(1);
    train_visited(visited_options(), [&](int pass) {
      if (pass == 3 && engine == 0) {
        EXPECT_EQ(message_on_a_thread([&] { torch::manual_seed(kSeed); }), "");
      } else if (pass == 3) {
        apart = draw();
      }
    });
    if (engine == 0) {
      EXPECT_TRUE(at::equal(draw(), expected));
    }
  }
  EXPECT_FALSE(at::equal(apart, expected)) << "a number of that seed comes again in a warm-up";
}

TEST_F(TwoEnginesTest, AStepInsideAnotherEnginesStepServesItsOwnModel) {
  Trainer outer(device_, options());
  Trainer inner(device_, options());
  for (std::int64_t s = 0; s < 5; ++s) {
    expect_same_step(outer.model, &*outer.engine, outer.plain, s, [&](BlockModel& model) {
      if (&model == &outer.model) {
        inner.expect_plain(50 + s, 51 + s);
      }
      model.loss_of(s).backward();
    });
  }
  EXPECT_EQ(outer.engine->report().replays, 8);
  EXPECT_EQ(inner.engine->report().replays, 8);
}

/// A teacher whose modules another engine knows, and one that no engine knows, run as if they were called directly.
TEST_F(TwoEnginesTest, ModulesOfOthersRunPlainlyInAStep) {
  Trainer trainer(device_, options());
  Trainer other(device_, options());
  BlockModel nobodys(BlockModel::Shape{});
  nobodys.to(device_);
  for (std::int64_t s = 0; s < 4; ++s) {
    expect_same_step(trainer.model, &*trainer.engine, trainer.plain, s, [&](BlockModel& own) {
      for (BlockModel* foreign : {&other.model, &nobodys}) {
        clear_gradients(*foreign);
        foreign->loss_of(s).backward();
      }
      EXPECT_TRUE(same(gradients(other.model), gradients(nobodys)));
      own.loss_of(s).backward();
    });
  }
  EXPECT_EQ(trainer.engine->report().captures, 8);
  EXPECT_EQ(trainer.engine->report().replays, 8);
  EXPECT_EQ(trainer.engine->report().eager_calls, 4) << "those of the first step";
}

TEST_F(TwoEnginesTest, AModuleThatJoinsTheModelIsItsOwnFromTheNextStepOn) {
  VisitedModel model([](int) {});
  const auto late = std::make_shared<Visiting>([](int) {});
  model.to(device_);
  late->to(device_);
  OffloadEngine engine(model, visited_options().graph("*"));
  for (int s = 0; s < 5; ++s) {
    if (s == 1) {
      model.register_module("late", late);
    }
    const auto step = engine.step();
    const at::Tensor x = at::ones({8, 8}, at::TensorOptions().device(device_)).requires_grad_(true);
    call(late, call(model.visited, x)).sum().backward();
  }
  EXPECT_EQ(engine.report().captures, 4);
}

}  // namespace
}  // namespace sidestream::testing_model
