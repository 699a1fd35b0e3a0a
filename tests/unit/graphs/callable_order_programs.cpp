// Programs of callables whose weight gradients are delayed, and of callables in a pipeline's order.
#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "sidestream/error.h"
#include "sidestream/pipeline_order.h"
#include "unit/graphs/engine_program.h"
#include "unit/graphs/rank_programs.h"

namespace sidestream::testing_model {
namespace {

/// Two microbatches of one stack whose weight gradients are delayed: those of the first are computed while the second is in flight.
class DelayedWeightGradients final : public StackProgram {
 public:
  /// `drops`: before each step another one ends without the weight gradients of most layers.
  DelayedWeightGradients(const Runtimes& runtimes, bool drops) : StackProgram(runtimes, kLayers), drops_(drops) {
    if (make_engine(*model_, stack_options().lookahead(0))) {
      for (std::size_t m = 0; m < kMicrobatches; ++m) {
        capture_linked(callables(0, kLayers), GraphOptions().gradients("**", GradientPolicy::delayed));
      }
    }
  }
  ~DelayedWeightGradients() override { end(); }

  std::vector<at::Tensor> step(std::int64_t s) override {
    if (drops_ && engine_) {
      drop(s);
    }
    model_->zero_grad();
    std::vector<at::Tensor> results;
    std::vector<at::Tensor> x;
    std::vector<at::Tensor> y;
    for (std::size_t m = 0; m < kMicrobatches; ++m) {  // forward, forward, backward, weights, backward, weights
      x.push_back(rows_of(s, static_cast<std::int64_t>(m)).requires_grad_(true));
      y.push_back(forward(m, x.back()));
    }
    for (std::size_t m = 0; m < kMicrobatches; ++m) {
      (y[m] * rows_of(s, static_cast<std::int64_t>(m) + 5)).sum().backward();
      results.push_back(x[m].grad());
      const auto& order = kOrders[(kMicrobatches * static_cast<std::size_t>(s) + m) % kOrders.size()];
      for (std::size_t i = 0; i < kLayers && engine_; ++i) {
        layers_[m * kLayers + order[i]].backward_dw();
      }
    }
    add_gradients(results);
    return results;
  }

 private:
  static constexpr std::size_t kLayers = 4;
  static constexpr std::size_t kMicrobatches = 2;
  /// Of the layers' weight gradients. The second one is the order of the backwards, and in the last two the reload is for another layer.
  static constexpr std::array<std::array<std::size_t, kLayers>, 4> kOrders{
      {{0, 1, 2, 3}, {3, 2, 1, 0}, {2, 3, 1, 0}, {3, 1, 2, 0}}};
  /// The reload for the next weight gradients is queued when the step ends.
  void drop(std::int64_t s) {
    model_->zero_grad();  // the last step's gradients are kept
    Step step = engine_->step();
    forward(0, rows_of(s, 9).requires_grad_(true)).sum().backward();
    layers_[kLayers - 1].backward_dw();
    try {
      step.finish();
    } catch (const UsageError&) {  // it names the others
    }
  }
  [[nodiscard]] at::Tensor forward(std::size_t m, at::Tensor h) {
    for (std::size_t i = 0; i < kLayers && engine_; ++i) {
      h = layers_[m * kLayers + i]({h})[0];
    }
    return engine_ ? h : run(0, kLayers, std::move(h));
  }

  bool drops_;
};

/// Callables in the order of a rank with `stages` virtual stages of two layers.
class OrderedStages final : public StackProgram {
 public:
  /// `chunks`: the engine is told of chunks and of the order.
  OrderedStages(const Runtimes& runtimes, std::size_t stages, const std::vector<PipelineStep>& order, bool chunks)
      : StackProgram(runtimes, 2 * stages), order_(order), chunks_(chunks) {
    if (make_engine(*model_, stack_options())) {
      std::vector<Callable> layers = callables(0, model_->size());
      for (std::size_t i = 0; i < layers.size(); ++i) {
        layers[i].stage(static_cast<std::int64_t>(i) / 2);
      }
      GraphOptions options = GraphOptions().order(order_);
      if (std::any_of(order_.begin(), order_.end(), is_of_weights)) {
        options.gradients("**", GradientPolicy::delayed);
      }
      capture_linked(layers, options, [](std::size_t i) { return i % 2 == 0; });
    }
  }
  ~OrderedStages() override { end(); }
  std::vector<at::Tensor> step(std::int64_t s) override {
    model_->zero_grad();
    std::optional<Step> in_step;
    if (engine_) {
      in_step.emplace(chunks_ ? engine_->step(order_) : engine_->step());
    }
    std::map<std::pair<std::int64_t, std::int64_t>, std::pair<at::Tensor, at::Tensor>> in_flight;
    std::vector<at::Tensor> results;
    for (const PipelineStep& work : order_) {
      if (is_of_weights(work)) {
        compute_weights(work);
        continue;
      }
      auto& [input, output] = in_flight[{work.stage, work.microbatch}];
      if (work.kind == PipelineStep::Kind::forward) {
        input = rows_of(100 * s + work.microbatch, work.stage).requires_grad_(true);
        const std::optional<Chunk> chunk =
            chunk_of(engine_ && chunks_ ? &*engine_ : nullptr, {work.stage, work.microbatch});
        const auto first = 2 * static_cast<std::size_t>(work.stage);
        output = run(first, first + 2, input);
      } else {
        (output * rows_of(100 * s + work.microbatch, 10 + work.stage)).sum().backward();
        results.push_back(input.grad());
        in_flight.erase({work.stage, work.microbatch});
      }
    }
    if (in_step) {
      in_step->finish();
    }
    add_gradients(results);
    for (at::Tensor& result : results) {
      result = result.clone();
    }
    return results;
  }

 private:
  static bool is_of_weights(const PipelineStep& work) { return work.kind == PipelineStep::Kind::weight_gradients; }
  void compute_weights(const PipelineStep& work) {
    if (engine_ && chunks_) {
      engine_->backward_dw({work.stage, work.microbatch});
      return;
    }
    for (auto i = 2 * static_cast<std::size_t>(work.stage); engine_ && i < 2 * static_cast<std::size_t>(work.stage) + 2;
         ++i) {
      layers_[i].backward_dw();
    }
  }

  std::vector<PipelineStep> order_;
  bool chunks_;
};

}  // namespace

std::vector<NamedProgram> callable_order_programs() {
  std::vector<NamedProgram> result;
  result.push_back(named_program<DelayedWeightGradients>("delayed_weights", false));
  result.push_back(named_program<DelayedWeightGradients>("delayed_weights_dropped", true));
  result.push_back(named_program<OrderedStages>("callables_in_order", 1, pipeline_order({2, 1, 3}, 0), false));
  result.push_back(
      named_program<OrderedStages>("callables_in_order_interleaved", 2, pipeline_order({2, 2, 2}, 0), true));
  const std::vector<PipelineStep> zero_bubble = pipeline_order({2, 1, 3, 0, /*delay_weight_gradients=*/true}, 0);
  result.push_back(named_program<OrderedStages>("callables_in_order_zero_bubble", 1, zero_bubble, false));
  result.push_back(named_program<OrderedStages>("callables_in_order_zero_bubble_chunks", 1, zero_bubble, true));
  const std::vector<RankProgram> random = random_callable_programs();
  for (const std::size_t i : {2, 4}) {  // of whole backwards
    result.push_back(named_program<OrderedStages>("callables_in_" + random[i].name, random[i].place.parts,
                                                  order_of_chunks(random[i].order(0), random[i].layers), i == 2));
  }
  return result;
}

}  // namespace sidestream::testing_model
