#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include "expect_throws.h"
#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/pipeline_order.h"
#include "unit/graphs/called_stack.h"

namespace sidestream::testing_model {

/// Two virtual stages of two layers, for the first of two ranks. Four microbatches.
class CallableOrderTest : public testing::Test {
 protected:
  using Kind = PipelineStep::Kind;
  using Order = std::vector<PipelineStep>;
  using Chunks = std::map<std::pair<std::int64_t, std::int64_t>, std::pair<at::Tensor, at::Tensor>>;
  static constexpr std::int64_t kLayers = 4;  ///< of both stages
  enum class Told : std::uint8_t {
    nothing,  ///< callables find their turn
    chunks,   ///< what chunk they are of
    order,    ///< the same, and the order of the step
    no_step,  ///< nothing, and there is no step of the engine
  };
  /// Runs one piece of work of a step. The engine: null if callables are not told of their chunks.
  using RunOne = std::function<void(CalledStack&, OffloadEngine*, const PipelineStep&, Chunks&, StepTensors&)>;

  static Order forward_and_backward(std::int64_t microbatch) {
    return {{0, microbatch, Kind::forward}, {0, microbatch, Kind::backward}};
  }
  /// Nothing is in flight behind the first backward.
  static Order with_a_rest() {
    Order order = forward_and_backward(0);
    for (const Kind kind : {Kind::forward, Kind::backward}) {
      for (const std::int64_t m : {1, 2}) {
        order.push_back({0, m, kind});
      }
    }
    return order;
  }
  explicit CallableOrderTest(const Mlp::Extras& extras = {})
      : model_(device_, extras, kLayers), plain_(device_, extras, kLayers) {}
  [[nodiscard]] Options options() const {
    return Options(device_).min_bytes(256).offload("layers.*.*").check_steps(16).lag(0);
  }
  [[nodiscard]] std::vector<Callable> callables(std::int64_t layers = kLayers) const {
    std::vector<Callable> all;
    for (std::int64_t i = 0; i < layers; ++i) {
      all.emplace_back("layers." + std::to_string(i), *(model_.layers->begin() + i));
      all.back().stage(i / 2);
    }
    return all;
  }
  [[nodiscard]] std::vector<std::vector<Sample>> samples(std::int64_t layers = kLayers) const {
    std::vector<std::vector<Sample>> all;
    for (std::int64_t i = 0; i < layers; ++i) {
      all.push_back({i % 2 == 0 ? Sample(rows(900, device_).requires_grad_()) : Sample::output_of(i - 1)});
    }
    return all;
  }
  void capture(OffloadEngine& engine, const GraphOptions& options, std::int64_t layers = kLayers) {
    graphed_ = make_graphed_callables(engine, callables(layers), samples(layers), options);
  }
  [[nodiscard]] at::Tensor forward(CalledStack& model, std::int64_t stage, at::Tensor h) const {
    for (std::int64_t i = 2 * stage; i < 2 * stage + 2; ++i) {
      const auto layer = static_cast<std::size_t>(i);
      h = &model == &plain_ ? model.run_layer(layer, h) : graphed_[layer]({h})[0];
    }
    return h;
  }
  /// Of all layers of a chunk. `engine`: null if the callables themselves are asked.
  void compute_weights(OffloadEngine* engine, const PipelineStep& work) const {
    if (engine != nullptr) {
      engine->backward_dw({work.stage, work.microbatch});
      return;
    }
    for (std::int64_t i = 2 * work.stage; i < 2 * work.stage + 2; ++i) {
      graphed_[static_cast<std::size_t>(i)].backward_dw();
    }
  }
  /// Runs `work` of step `s`.
  void run(CalledStack& model, OffloadEngine* engine, const PipelineStep& work, std::int64_t s, Chunks& in_flight,
           StepTensors& given) const {
    if (work.kind == Kind::weight_gradients) {
      if (&model == &model_) {
        compute_weights(engine, work);
      }
      return;
    }
    auto& [input, output] = in_flight[{work.stage, work.microbatch}];
    if (work.kind == Kind::forward) {
      input = rows(100 * s + work.microbatch, device_, work.stage).requires_grad_();
      const std::optional<Chunk> chunk = chunk_of(engine, {work.stage, work.microbatch});
      output = forward(model, work.stage, input);
    } else {
      output.square().mean().backward();
      given.emplace_back("gradient of an input", input.grad());
      in_flight.erase({work.stage, work.microbatch});
    }
  }
  /// A step that runs `runs`, each piece by `one`, if given, else by `run`.
  void expect_plain_step(OffloadEngine& engine, std::int64_t s, const Order& runs, Told told, const RunOne& one = {}) {
    expect_same_step(model_, nullptr, plain_, s, [&](CalledStack& model) {
      torch::manual_seed(static_cast<std::uint64_t>(s));
      const bool mine = &model == &model_;
      StepTensors given;
      Chunks in_flight;
      std::optional<Step> step;
      if (mine && told != Told::no_step) {
        step.emplace(told == Told::order ? engine.step(runs) : engine.step());
      }
      OffloadEngine* const of = mine && (told == Told::chunks || told == Told::order) ? &engine : nullptr;
      for (const PipelineStep& work : runs) {
        if (one) {
          one(model, of, work, in_flight, given);
        } else {
          run(model, of, work, s, in_flight, given);
        }
      }
      if (step) {
        step->finish();
      }
      return given;
    });
  }
  /// The same, and all callables replay.
  void expect_replays(OffloadEngine& engine, std::int64_t s, const Order& runs, Told told = Told::nothing) {
    const std::int64_t eager = engine.report().eager_calls;
    expect_plain_step(engine, s, runs, told);
    const Report report = engine.report();
    EXPECT_EQ(report.eager_calls, eager);
    EXPECT_EQ(report.replays, 2 * static_cast<std::int64_t>(runs.size()));  // two layers a chunk
    EXPECT_EQ(report.order_findings, std::vector<std::string>());
  }
  /// A step that begins with `runs`, and that a UsageError with `text` ends.
  void expect_refused(OffloadEngine& engine, const std::string& text, const Order& runs, Told told = Told::nothing) {
    const auto steps = [&] {
      const Step step = engine.step();
      StepTensors given;
      Chunks in_flight;
      for (const PipelineStep& work : runs) {
        run(model_, told == Told::nothing ? nullptr : &engine, work, 50, in_flight, given);
      }
    };
    EXPECT_THROWS(UsageError, text.c_str(), steps());
    clear_gradients(model_);
  }
  /// Steps that come to nothing.
  void run_in_vain(const Order& runs) {
    StepTensors given;
    Chunks in_flight;
    for (const PipelineStep& work : runs) {
      run(model_, nullptr, work, 60, in_flight, given);
    }
    in_flight.clear();
    clear_gradients(model_);
  }
  void expect_bad(const std::string& text, const GraphOptions& options, std::int64_t layers = kLayers) {
    OffloadEngine engine(model_, this->options());
    EXPECT_THROWS(UsageError, text.c_str(), capture(engine, options, layers));
  }

  c10::Device device_ = find_device("sim");
  CalledStack model_, plain_;
  std::vector<GraphedCallable> graphed_;
  Order order_ = pipeline_order(PipelineShape{2, 2, 4}, 0);
  Order one_stage_ = pipeline_order(PipelineShape{3, 1, 6}, 0);
};

}  // namespace sidestream::testing_model
