// Modules that keep what they take: their input, or a tensor whose autograd history leads to it. It is the output of another graphed call.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "models/body_model.h"
#include "models/plain_twin.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graph_pool.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/pipeline_order.h"

namespace sidestream::testing_model {
namespace {

/// Its backward does not need its output.
at::Tensor plain_layer(BodyBlock& block, const at::Tensor& x) { return x + at::matmul(x, block.weight).tanh(); }

at::Tensor keeps_its_input(BodyBlock& block, const at::Tensor& x) {
  block.kept = x.detach();
  return plain_layer(block, x);
}

at::Tensor keeps_its_argument(BodyBlock& block, const at::Tensor& x) {
  block.kept = x;
  return plain_layer(block, x);
}

/// Attention weights to look at, with their history. The gradient of the input's leaf keeps that leaf.
at::Tensor keeps_attention(BodyBlock& block, const at::Tensor& x) {
  const at::Tensor h = at::matmul(x, block.weight);
  block.kept = at::softmax(at::matmul(h, h.transpose(1, 2)) * 0.25, -1);
  return x + at::matmul(block.kept, h).tanh();
}

/// No backward runs through the kept tensor, so what its node saved stays.
at::Tensor keeps_a_square(BodyBlock& block, const at::Tensor& x) {
  block.kept = x.square();
  return plain_layer(block, x);
}

struct KeepingBody {
  const char* name;
  BodyBlock::Body body;
};

std::vector<KeepingBody> forms() {
  return {{"Input", keeps_its_input},
          {"Argument", keeps_its_argument},
          {"Attention", keeps_attention},
          {"Square", keeps_a_square}};
}

Options options_of(c10::Device device, bool offloads, bool graphs_calls = true) {
  Options options = Options(device).min_bytes(256).lag(0);
  options = graphs_calls ? options.graph("blocks.*") : options;
  return offloads ? options.offload("blocks.*") : options;
}

std::vector<GraphedCallable> graph_blocks(OffloadEngine& engine, BodyModel& model, const GraphOptions& options = {}) {
  std::vector<Callable> callables;
  std::vector<std::vector<Sample>> samples;
  for (std::size_t i = 0; i < model.blocks->size(); ++i) {
    callables.emplace_back(
        "blocks." + std::to_string(i), [](BodyBlock& of, const Tensors& in) { return Tensors{of.forward(in[0])}; },
        model.blocks->ptr<BodyBlock>(i));
    samples.push_back({i == 0 ? Sample(model.data(0, 8, 2).requires_grad_(true)) : Sample::output_of(i - 1)});
  }
  return make_graphed_callables(engine, callables, samples, options);
}

/// What each block keeps, copied.
StepTensors kept_of(BodyModel& model) {
  StepTensors kept;
  for (std::size_t i = 0; i < model.blocks->size(); ++i) {
    kept.emplace_back("kept of " + std::to_string(i), model.block(i).kept);
  }
  return kept;
}

/// Gradients, and what the blocks keep: after the forward, and after the step.
StepTensors train(BodyModel& model, OffloadEngine* engine, std::int64_t s,
                  const std::vector<GraphedCallable>& graphed) {
  StepTensors between;
  StepTensors all = train_step(model, engine, [&] {
    at::Tensor y;
    if (graphed.empty()) {
      y = model.forward(model.data(s, 8, 2));
    } else {
      y = at::matmul(model.data(s, 8, 2), model.first);
      for (const GraphedCallable& callable : graphed) {
        y = callable({y})[0];
      }
      y = at::matmul(y, model.last);
    }
    between = kept_of(model);
    (y * model.data(s, 8, 2, 1)).sum().backward();
  });
  const StepTensors behind = kept_of(model);
  all.insert(all.end(), between.begin(), between.end());
  all.insert(all.end(), behind.begin(), behind.end());
  return all;
}

class KeptInputTest : public testing::Test {
 protected:
  c10::Device device_ = find_device("sim");
};

TEST_F(KeptInputTest, IsThatOfPlainTraining) {
  for (const KeepingBody& form : forms()) {
    for (const std::size_t layers : {2, 3}) {
      for (const bool offloads : {false, true}) {
        for (const bool callables : {false, true}) {
          SCOPED_TRACE(std::string(form.name) + ", " + std::to_string(layers) + " layers" +
                       (offloads ? ", offloaded" : "") + (callables ? ", callables" : ", calls"));
          BodyTwins twins(device_, std::vector<BodyBlock::Body>(layers, form.body));
          OffloadEngine engine(twins.mine, options_of(device_, offloads, !callables));
          const std::vector<GraphedCallable> graphed =
              callables ? graph_blocks(engine, twins.mine) : std::vector<GraphedCallable>();
          for (std::int64_t s = 0; s < 4; ++s) {
            EXPECT_TRUE(same(train(twins.mine, &engine, s, graphed), train(twins.plain, nullptr, s, {})))
                << "step " << s;
          }
          EXPECT_EQ(engine.report().replays, 2 * layers) << "of the last step";
        }
      }
    }
  }
}

TEST_F(KeptInputTest, OfMicrobatchesInFlightIsThatOfPlainTraining) {
  for (const KeepingBody& form : forms()) {
    SCOPED_TRACE(form.name);
    BodyTwins twins(device_, {form.body, form.body, form.body});
    OffloadEngine engine(twins.mine, options_of(device_, /*offloads=*/true));
    for (std::int64_t s = 0; s < 4; ++s) {
      const auto step = [s](BodyModel& model, OffloadEngine* in) {
        StepTensors all = train_step(model, in, [&] {
          std::vector<at::Tensor> losses;
          const auto forward = [&](std::int64_t m) {
            losses.push_back((model.forward(model.data(3 * s + m, 8, 2)) * model.data(s, 8, 2, 1)).sum());
          };
          forward(0);
          losses[0].backward();
          forward(1);
          forward(2);  // a capture of its own, which is made last: what it keeps is that of the last forward
          losses[1].backward();
          losses[2].backward();
        });
        const StepTensors kept = kept_of(model);
        all.insert(all.end(), kept.begin(), kept.end());
        return all;
      };
      EXPECT_TRUE(same(step(twins.mine, &engine), step(twins.plain, nullptr))) << "step " << s;
    }
    EXPECT_GT(engine.report().replays, 0);
  }
}

TEST_F(KeptInputTest, TheReportNamesTheCallThatKeepsIt) {
  BodyModel model(device_, {keeps_its_input, keeps_its_input});
  OffloadEngine engine(model, options_of(device_, /*offloads=*/false));
  (void)model.step(&engine, 0);
  (void)model.step(&engine, 1);
  std::string notes;
  for (const std::string& note : engine.report().notes) {
    notes += note + "\n";
  }
  EXPECT_NE(notes.find("\"blocks.1\" keeps tensors that it takes from other calls (1024 bytes)"), std::string::npos)
      << notes;
  EXPECT_EQ(notes.find("\"blocks.0\" keeps"), std::string::npos) << notes;
}

TEST_F(KeptInputTest, ABackwardThroughWhatALayerKeepsIsRefused) {
  const auto with_a_penalty = [](BodyBlock& block, const at::Tensor& x) {
    const at::Tensor h = keeps_attention(block, x);
    block.other = block.kept.square().mean();
    return h;
  };
  BodyModel model(device_, {with_a_penalty, with_a_penalty});
  OffloadEngine engine(model, options_of(device_, /*offloads=*/false));
  const auto step = [&](std::int64_t s) {
    (void)train_step(model, &engine, [&] {
      at::Tensor loss = model.forward(model.data(s, 8, 2)).square().mean();
      loss = loss + model.block(0).other + model.block(1).other;
      loss.backward();
    });
  };
  step(0);
  EXPECT_THROWS(UsageError, "a backward pass reaches a tensor that the call made and keeps", step(1));
}

TEST_F(KeptInputTest, AStateThatTheBodyReplacesByItsInputIsRefused) {
  const auto differs = [](BodyBlock& block, const at::Tensor& x) {
    const at::Tensor before = block.kept.defined() ? block.kept : at::zeros_like(x.detach());
    block.kept = x.detach();
    return plain_layer(block, x - before * 0.5);
  };
  BodyModel model(device_, {keeps_its_input, differs});
  OffloadEngine engine(model, options_of(device_, /*offloads=*/false));
  (void)model.step(&engine, 0);
  EXPECT_THROWS(CaptureError, "graphed call \"blocks.1\": it reads a tensor of 1024 bytes that it keeps",
                (void)engine.step());
}

TEST_F(KeptInputTest, KeptInTheCaptureAloneIsRefusedWithTheNamesOfTheCallsThatMayKeepIt) {
  const auto later = [runs = std::make_shared<int>(0)](BodyBlock& block, const at::Tensor& x) {
    if (++*runs > 1) {
      block.kept = x.detach();
    }
    return plain_layer(block, x);
  };
  BodyModel model(device_, {plain_layer, later, plain_layer});
  OffloadEngine engine(model, Options(device_));
  EXPECT_THROWS(CaptureError,
                "\"blocks.0\": its output of 1024 bytes is kept from call to call by the call itself, or by graphed "
                "call \"blocks.1\", which takes it",
                (void)graph_blocks(engine, model, GraphOptions().num_warmup_iters(0)));
}

TEST_F(KeptInputTest, InMemoryThatCapturesShareIsRefused) {
  BodyModel model(device_, {plain_layer, keeps_its_input});
  OffloadEngine engine(model, Options(device_));
  const auto pool = std::make_shared<GraphPool>(device_);
  EXPECT_THROWS(CaptureError, "\"blocks.1\": it keeps a tensor of 1024 bytes that it takes from another call",
                (void)graph_blocks(engine, model, GraphOptions().pool(pool)));
}

/// Returns an output that no call takes, and keeps it. A forward follows its backward.
TEST_F(KeptInputTest, AnOutputThatNoCallTakesMayBeKept) {
  const auto both = [](BodyBlock& block, const Tensors& in) {
    const at::Tensor h = at::matmul(in[0], block.weight).tanh();
    const at::Tensor mean = h.detach() * 2;
    block.kept = mean;
    return Tensors{h, mean};
  };
  using Kind = PipelineStep::Kind;
  BodyModel model(device_, {keeps_its_input});
  BodyModel plain(device_, {keeps_its_input});
  OffloadEngine engine(model, Options(device_));
  const std::shared_ptr<BodyBlock> block = model.blocks->ptr<BodyBlock>(0);
  const auto graphed = make_graphed_callables(
      engine, {{"both", both, block}}, {{model.data(0, 8, 2).requires_grad_(true)}},
      GraphOptions().order(
          {{0, 0, Kind::forward}, {0, 0, Kind::backward}, {0, 1, Kind::forward}, {0, 1, Kind::backward}}))[0];
  const auto step = [&](BodyModel& of, OffloadEngine* in, std::int64_t s) {
    StepTensors kept;
    StepTensors all = train_step(of, in, [&] {
      for (std::int64_t m = 0; m < 2; ++m) {
        const at::Tensor x = of.data(2 * s + m, 8, 2).requires_grad_(true);
        const Tensors out = in != nullptr ? graphed({x}) : both(of.block(0), {x});
        kept.emplace_back("mean", out[1]);
        (out[0] * out[1]).sum().backward();
      }
    });
    all.insert(all.end(), kept.begin(), kept.end());
    all.emplace_back("kept", of.block(0).kept);
    return all;
  };
  for (std::int64_t s = 0; s < 4; ++s) {
    EXPECT_TRUE(same(step(model, &engine, s), step(plain, nullptr, s))) << "step " << s;
  }
}

}  // namespace
}  // namespace sidestream::testing_model
