#include "sidestream/call.h"

#include <algorithm>
#include <array>
#include <functional>
#include <sstream>
#include <stdexcept>

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include "expect_throws.h"
#include "models/block_model.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/scope.h"
#include "warnings.h"

namespace sidestream {
namespace {

using testing_model::BlockModel;
using testing_model::train_step;

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
    const auto batch = testing_model::batch_of(model.shape(), s, device_);
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
  std::array<at::Tensor, 2> input_grads_;  ///< of the model, of its twin
};

TEST_F(CallTest, ANewIntegerIsAnotherCapture) {
  OffloadEngine engine(model_, options().call_options(CallOptions().max_captures(2)));
  expect_plain(engine, 0, 3, 0);
  EXPECT_EQ(engine.report().captures, 8);
  expect_plain(engine, 3, 5, 4);
  EXPECT_EQ(engine.report().captures, 16);
  EXPECT_EQ(engine.report().recaptures, 4);
  EXPECT_EQ(engine.report().replays, 8);
  expect_plain(engine, 5, 6, 0);
  expect_plain(engine, 6, 7, 4);
  EXPECT_EQ(engine.report().captures, 16) << "both values replay";
  testing_model::ExpectedWarnings warnings;
  expect_plain(engine, 7, 10, 8);
  expect_plain(engine, 10, 11, 12);
  EXPECT_EQ(engine.report().captures, 16) << "beyond the bound it runs eagerly";
  EXPECT_EQ(engine.report().replays, 0);
  const std::vector<std::string> texts = warnings.take();
  ASSERT_EQ(texts.size(), 4U) << "one for each block";
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "graphed call \"blocks.0\" needs more than the 2 captures", texts[0]);
  expect_plain(engine, 11, 13, 0);
  EXPECT_EQ(engine.report().replays, 8);
}

TEST_F(CallTest, ANewIntegerRunsEagerlyByOption) {
  OffloadEngine engine(model_, options().call_options(CallOptions().on_new_arguments(OnNewArguments::eager)));
  expect_plain(engine, 0, 3, 0);
  EXPECT_EQ(engine.report().eager_calls, 4) << "the sizing pass";
  expect_plain(engine, 3, 5, 4);
  EXPECT_EQ(engine.report().captures, 8);
  EXPECT_EQ(engine.report().replays, 0);
  expect_plain(engine, 5, 6, 0);
  EXPECT_EQ(engine.report().replays, 8);
}

TEST_F(CallTest, ANewIntegerIsAnErrorByOption) {
  OffloadEngine engine(model_, options().call_options(CallOptions().on_new_arguments(OnNewArguments::error)));
  expect_plain(engine, 0, 3, 0);
  EXPECT_THROWS(UsageError, "new value", {
    const auto step = engine.step();
    train(model_, 3, 4);
  });
  expect_plain(engine, 4, 6, 0);
}

class CallMicrobatchTest : public CallTest, public testing::WithParamInterface<std::int64_t> {};

TEST_P(CallMicrobatchTest, AccumulateOneAfterTheOther) {
  OffloadEngine engine(model_, options(GraphOptions().side_streams(GetParam())));
  for (std::int64_t s = 0; s < 4; ++s) {
    expect_plain(engine, s, [&](BlockModel& model, std::int64_t step) {
      train(model, 10 * step);
      train(model, 10 * step + 1);
    });
  }
  EXPECT_EQ(engine.report().captures, 8) << "one capture serves both";
  EXPECT_EQ(engine.report().replays, 16);
}

TEST_P(CallMicrobatchTest, TwoInFlight) {
  OffloadEngine engine(model_, options(GraphOptions().side_streams(GetParam())));
  const auto run = [&](BlockModel& model, std::int64_t step) {
    const auto first = testing_model::batch_of(model.shape(), 10 * step, device_);
    const auto second = testing_model::batch_of(model.shape(), 10 * step + 1, device_);
    const at::Tensor a = model.loss(first.tokens, first.targets);
    const at::Tensor b = model.loss(second.tokens, second.targets);
    (step % 2 == 0 ? a : b).backward();
    (step % 2 == 0 ? b : a).backward();
  };
  for (std::int64_t s = 0; s < 4; ++s) {
    expect_plain(engine, s, run);
  }
  EXPECT_EQ(engine.report().captures, 16);
  EXPECT_EQ(engine.report().replays, 16);
}

INSTANTIATE_TEST_SUITE_P(SideStreams, CallMicrobatchTest, testing::Values(1, 2, 3));

TEST_F(CallTest, MicrobatchesInFlightAreBounded) {
  const auto in_flight = [&](BlockModel& model) {
    const auto batch = testing_model::batch_of(model.shape(), 1, device_);
    const at::Tensor a = model.loss(batch.tokens, batch.targets);
    const at::Tensor b = model.loss(batch.tokens, batch.targets);
    (a + b).backward();
  };
  OffloadEngine bounded(model_, options().call_options(CallOptions().max_captures(1)));
  expect_plain(bounded, 0, 2);
  {
    testing_model::ExpectedWarnings warnings;
    for (std::int64_t s = 2; s < 4; ++s) {
      expect_plain(bounded, s, [&](BlockModel& model, std::int64_t /*step*/) { in_flight(model); });
    }
    EXPECT_EQ(warnings.take().size(), 4U) << "one for each block";
    EXPECT_EQ(bounded.report().replays, 8) << "the first; the second runs eagerly";
  }
  expect_plain(bounded, 4, 6);
  OffloadEngine refusing(model_, options().call_options(CallOptions().on_pending(OnPending::error)));
  expect_plain(refusing, 6, 8);
  EXPECT_THROWS(UsageError, "still pending", {
    const auto step = refusing.step();
    in_flight(model_);
  });
  expect_plain(refusing, 8, 10);
}

TEST_F(CallTest, NewShapesAreAnotherCapture) {
  OffloadEngine engine(model_, options());
  expect_plain(engine, 0, 2);
  for (std::int64_t s = 2; s < 5; ++s) {
    expect_plain(engine, s, [&](BlockModel& model, std::int64_t step) {
      const auto batch = testing_model::batch_of(model.shape(), step, device_);
      model.loss(batch.tokens.slice(1, 0, 8), batch.targets.slice(1, 0, 8).contiguous()).backward();
    });
  }
  EXPECT_EQ(engine.report().captures, 16);
  expect_plain(engine, 5, 6);
}

TEST_F(CallTest, RunsEagerlyUnderNoGradAndInEval) {
  OffloadEngine engine(model_, options());
  expect_plain(engine, 0, 2);
  const auto batch = testing_model::batch_of(model_.shape(), 3, device_);
  {
    const at::NoGradGuard no_grad;
    const double expected = plain_.loss(batch.tokens, batch.targets).item<double>();
    const auto step = engine.step();
    EXPECT_EQ(model_.loss(batch.tokens, batch.targets).item<double>(), expected);
  }
  EXPECT_EQ(engine.report().replays, 0);
  model_.eval();
  plain_.eval();
  expect_plain(engine, 4, 5);
  EXPECT_EQ(engine.report().replays, 0);
  model_.train();
  plain_.train();
  expect_plain(engine, 5, 6);
  EXPECT_EQ(engine.report().replays, 8);
  EXPECT_EQ(engine.report().captures, 8) << "what ran eagerly is not to be captured";
}

TEST_F(CallTest, PatternsThatMatchNothingListTheNames) {
  for (const bool graphs : {true, false}) {
    Options wrong = Options(device_).min_bytes(1024).graph("blocks.*");
    graphs ? wrong.graph("layers.*") : wrong.offload("blocks.*.core_attention");
    OffloadEngine engine(model_, wrong);
    {
      const auto step = engine.step();
      train(model_, 0);
    }
    EXPECT_THROWS(UsageError, graphs ? "layers.*" : "core_attention", (void)engine.step());
    EXPECT_THROWS(UsageError, graphs ? "blocks.*" : "blocks.*.core_attn", (void)engine.step());
  }
}

TEST_F(CallTest, AModuleOfAnotherModelRunsPlainly) {
  OffloadEngine engine(model_, options());
  expect_plain(engine, 0, 2);
  BlockModel other{BlockModel::Shape{}};
  other.to(device_);
  (void)train_step(plain_, nullptr, [&] { train(plain_, 2); });
  (void)train_step(model_, &engine, [&] {
    train(other, 2);
    train(model_, 2);
  });
  EXPECT_EQ(engine.report().captures, 8);
  expect_plain(engine, 3, 5);
}

TEST_F(CallTest, AForwardThatThrowsLeavesTheEngineUsable) {
  OffloadEngine engine(model_, options());
  for (std::int64_t s = 0; s < 5; ++s) {
    EXPECT_THROWS(std::runtime_error, "the data broke", {
      const auto step = engine.step();
      const auto batch = testing_model::batch_of(model_.shape(), 40 + s, device_);
      const at::Tensor loss = model_.loss(batch.tokens, batch.targets);
      if (s % 2 == 0) {
        loss.backward();
      }
      throw std::runtime_error("the data broke");
    });
    expect_plain(engine, s, s + 1);
  }
  EXPECT_EQ(engine.report().captures, 8);
}

TEST_F(CallTest, ResetCapturesAnew) {
  OffloadEngine engine(model_, options());
  expect_plain(engine, 0, 3);
  engine.reset();
  engine.reset();
  expect_plain(engine, 3, 6);
  EXPECT_EQ(engine.report().captures, 16);
  EXPECT_EQ(engine.report().replays, 8);
}

TEST_F(CallTest, RelocatedWeightsAreCapturedAgainOrRefused) {
  const auto move = [&] {
    for (at::Tensor& parameter : model_.parameters()) {
      parameter.set_data(parameter.detach().clone());
    }
  };
  {
    OffloadEngine engine(model_, options());
    expect_plain(engine, 0, 3);
    move();
    expect_plain(engine, 3, 5);
    EXPECT_EQ(engine.report().recaptures, 4);
  }
  OffloadEngine engine(model_, options(GraphOptions().on_relocated_weights(OnRelocatedWeights::error)));
  expect_plain(engine, 5, 7);
  move();
  EXPECT_THROWS(UsageError, "were relocated", (void)engine.step());
  engine.reset();
  expect_plain(engine, 7, 9);
}

TEST_F(CallTest, LoadedWeightsAreCapturedAgain) {
  OffloadEngine engine(model_, options());
  std::stringstream saved;
  {
    torch::serialize::OutputArchive archive;
    model_.save(archive);
    archive.save_to(saved);
  }
  expect_plain(engine, 0, 3);
  for (BlockModel* model : {&model_, &plain_}) {
    saved.seekg(0);
    torch::serialize::InputArchive archive;
    archive.load_from(saved);
    model->load(archive);
  }
  expect_plain(engine, 3, 5);
  EXPECT_EQ(engine.report().recaptures, 4);
}

TEST_F(CallTest, PinnedMemoryIsWhatLeavesAndNoMore) {
  OffloadEngine engine(model_, options());
  expect_plain(engine, 0, 4);
  const Report report = engine.report();
  EXPECT_GT(report.offloaded_bytes, 0);
  EXPECT_EQ(report.pinned_requested_bytes, report.offloaded_bytes);
}

// A graphed call's output lies in the graph's own memory: offloading it would free nothing.
TEST_F(CallTest, GraphedOutputsThatEagerScopesSaveStay) {
  OffloadEngine engine(model_, Options(device_).min_bytes(1024).graph("blocks.*").offload("square,last"));
  const auto run = [&](BlockModel& model, std::int64_t step) {
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(step));
    const at::Tensor x = at::randn({2, 16, 32}, generator).to(device_).requires_grad_(true);
    const at::Tensor& positions = &model == &model_ ? positions_ : plain_positions_;
    at::Tensor h = x;
    for (auto& block : *model.blocks) {
      h = call(block->as<testing_model::Block>(), h, stays(&positions), 0);
    }
    {
      const OffloadScope scope("square");
      h = h.square();  // saves what it is given
    }
    {
      const OffloadScope scope("last");
      h = h.tanh();
    }
    h.mean().backward();
  };
  const auto static_inputs = [&] {
    for (const ExclusionReport& exclusion : engine.report().exclusions) {
      if (exclusion.reason == "static input") {
        return exclusion.tensors;
      }
    }
    return std::int64_t{0};
  };
  for (std::int64_t s = 0; s < 2; ++s) {
    expect_plain(engine, s, run);
  }
  const std::int64_t before = static_inputs();
  expect_plain(engine, 2, run);
  EXPECT_EQ(static_inputs() - before, 1);
  EXPECT_EQ(engine.report().offloaded_bytes, 0);
}

// The blocks read a buffer of the model around them.
TEST_F(CallTest, ARelocatedBufferOfAnotherModuleIsCapturedAgain) {
  OffloadEngine engine(model_, options());
  expect_plain(engine, 0, 3);
  for (BlockModel* model : {&model_, &plain_}) {
    at::Tensor positions = model->named_buffers()["positions"];
    positions.set_data(positions.mul(-2));
  }
  expect_plain(engine, 3, 5);
  EXPECT_EQ(engine.report().recaptures, 4);
}

/// Eager scopes before, between and after the graphed blocks.
at::Tensor mixed_loss(BlockModel& model, const at::Tensor& positions, const at::Tensor& x) {
  at::Tensor h = x;
  int i = 0;
  for (auto& block : *model.blocks) {
    {
      const OffloadScope scope(i % 2 == 0 ? "even" : "odd");
      h = h.tanh().exp().mul(0.5);
    }
    h = call(block->as<testing_model::Block>(), h, stays(&positions), 0);
    ++i;
  }
  h = call(
      "head", [](const at::Tensor& in) { return in.sigmoid().exp(); }, h);
  return h.mean();
}

TEST_F(CallTest, EagerScopesStandBetweenGraphedCalls) {
  for (const char* graphed : {"blocks.*", "blocks.1,blocks.2", "blocks.*,head"}) {
    OffloadEngine engine(model_,
                         Options(device_).min_bytes(1024).graph(graphed).offload("even,odd,blocks.*.fc1,blocks.*.qkv"));
    for (std::int64_t s = 0; s < 4; ++s) {
      expect_plain(engine, s, [&](BlockModel& model, std::int64_t step) {
        auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(step));
        const at::Tensor x = at::randn({2, 16, 32}, generator).to(device_).requires_grad_(true);
        const at::Tensor& positions = &model == &model_ ? positions_ : plain_positions_;
        mixed_loss(model, positions, x).backward();
        input_grads_[&model == &model_ ? 0 : 1] = x.grad().cpu();
      });
      EXPECT_TRUE(at::equal(input_grads_[0], input_grads_[1])) << graphed << ", step " << s;
    }
    EXPECT_GT(engine.report().offloaded_bytes, 0);
    EXPECT_GT(engine.report().replays, 0);
  }
}

TEST_F(CallTest, RunsUnderAutocast) {
  struct Autocast {
    explicit Autocast(c10::DeviceType type) : type_(type) {
      at::autocast::set_autocast_enabled(type_, true);
      at::autocast::set_autocast_dtype(type_, at::kBFloat16);
      at::autocast::increment_nesting();
    }
    ~Autocast() {
      if (at::autocast::decrement_nesting() == 0) {
        at::autocast::clear_cache();
      }
      at::autocast::set_autocast_enabled(type_, false);
    }
    c10::DeviceType type_;
  };
  OffloadEngine engine(model_, options());
  for (std::int64_t s = 0; s < 4; ++s) {
    expect_plain(engine, s, [&](BlockModel& model, std::int64_t step) {
      const auto batch = testing_model::batch_of(model.shape(), step, device_);
      at::Tensor loss;
      {
        const Autocast autocast(device_.type());
        loss = model.loss(batch.tokens, batch.targets);
      }
      loss.backward();
    });
  }
  EXPECT_EQ(engine.report().replays, 8);
}

/// LibTorch's own form of a checkpoint: the forward runs without gradients, and again in backward.
struct Recomputed : torch::autograd::Function<Recomputed> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return run(x, weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const at::AutoGradMode grad_mode(true);
    const at::Tensor x = saved[0].detach().requires_grad_(true);
    const at::Tensor weight = saved[1].detach().requires_grad_(true);
    const auto made = torch::autograd::grad({run(x, weight)}, {x, weight}, {grads[0]});
    return {made[0], made[1]};
  }
  static at::Tensor run(const at::Tensor& x, const at::Tensor& weight) {
    return call(
        "inner", [](const at::Tensor& y, const at::Tensor& w) { return y.matmul(w).tanh(); }, x, weight);
  }
};

TEST_F(CallTest, ACallInACheckpointRunsEagerlyAndTheReportSaysSo) {
  OffloadEngine engine(model_, Options(device_).graph("inner,blocks.*"));
  const at::Tensor weight = (at::randn({32, 32}) * 0.1).to(device_).requires_grad_(true);
  for (std::int64_t s = 0; s < 4; ++s) {
    const at::Tensor x = at::randn({16, 32}).to(device_).requires_grad_(true);
    weight.mutable_grad() = at::Tensor();
    testing_model::in_step(&engine, [&] {
      Recomputed::apply(x, weight).sum().backward();
      train(model_, s);
    });
    const at::Tensor mine = weight.grad().clone();
    const at::Tensor mine_x = x.grad().clone();
    x.mutable_grad() = at::Tensor();
    weight.mutable_grad() = at::Tensor();
    Recomputed::apply(x, weight).sum().backward();
    EXPECT_TRUE(at::equal(mine.cpu(), weight.grad().cpu()));
    EXPECT_TRUE(at::equal(mine_x.cpu(), x.grad().cpu()));
  }
  const std::vector<std::string> notes = engine.report().notes;
  EXPECT_TRUE(std::any_of(notes.begin(), notes.end(), [](const std::string& note) {
    return note.find("\"inner\" ran eagerly 4 times under no_grad") == 0 &&
           note.find("1 of them have no capture") != std::string::npos;
  })) << testing::PrintToString(notes);
}

/// What users write who know nothing of Sidestream: backward runs the forward again, and backward inside it.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return (x.matmul(weight)).tanh();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const at::AutoGradMode grad_mode(true);
    const at::Tensor x = saved[0].detach().requires_grad_(true);
    x.matmul(saved[1]).tanh().backward(grads[0]);
    return {x.grad(), at::Tensor()};
  }
};

TEST_F(CallTest, ACheckpointOfTheUsersIsRefusedByName) {
  OffloadEngine engine(model_, options());
  const at::Tensor weight = (at::randn({32, 32}) * 0.1).to(device_).requires_grad_(true);
  const at::Tensor x = at::randn({16, 32}).to(device_).requires_grad_(true);
  const std::string message = testing_model::message_of<Error>([&] {
    (void)make_graphed_callables(engine, {Callable("checkpointed", owning([&](const Tensors& in) {
                                                     return Tensors{Checkpoint::apply(in[0], weight)};
                                                   }))},
                                 {{x}});
  });
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "checkpoint", message);
  EXPECT_FALSE(weight.grad().defined()) << "no capture has touched it";
  expect_plain(engine, 0, 3);
}

}  // namespace
}  // namespace sidestream
