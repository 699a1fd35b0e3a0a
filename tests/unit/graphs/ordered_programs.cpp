#include "unit/graphs/ordered_programs.h"

#include <map>
#include <optional>
#include <stdexcept>

#include "models/block_model.h"
#include "models/plain_twin.h"
#include "models/wrapping.h"
#include "sidestream/pipeline_order.h"
#include "unit/graphs/engine_program.h"

namespace sidestream::testing_model {
namespace {

/// Microbatches of a step, and how many forwards may wait for their backward. Behind the last of these, one forward and one
/// backward take turns, as in a pipeline.
struct Microbatches {
  std::int64_t count = 1;
  std::size_t in_flight = 1;
  bool in_order = false;                   ///< they are chunks, and the engine is told their order
  std::optional<std::int64_t> drops = {};  ///< each second step drops this microbatch before its backward
  bool delays = false;                     ///< weight gradients, by a backward

  [[nodiscard]] std::vector<PipelineStep> order() const {
    std::vector<PipelineStep> order;
    std::int64_t next = 0;
    const auto add_backward = [&] {
      order.push_back({0, next, PipelineStep::Kind::backward});
      if (delays && next > 0) {
        order.push_back({0, next - 1, PipelineStep::Kind::weight_gradients});
      }
      ++next;
    };
    for (std::int64_t microbatch = 0; microbatch < count; ++microbatch) {
      order.push_back({0, microbatch, PipelineStep::Kind::forward});
      if (microbatch - next + 1 == static_cast<std::int64_t>(in_flight)) {
        add_backward();
      }
    }
    while (next < count) {
      add_backward();
    }
    if (delays) {
      order.push_back({0, next - 1, PipelineStep::Kind::weight_gradients});
    }
    return order;
  }
};

/// Whole steps of a BlockModel, weights changing from step to step.
class WholeSteps final : public EngineProgram {
 public:
  WholeSteps(const Runtimes& runtimes, const Wrapping& wrapping, Microbatches microbatches)
      : EngineProgram(runtimes), microbatches_(microbatches) {
    BlockModel::Shape shape;
    shape.layers = 5;
    shape.hidden = 16;  // it is run again in a hundred orders
    model_ = std::make_unique<BlockModel>(shape);
    model_->to(device());
    Options options = wrapping.options(device(), 1024);
    if (microbatches.delays) {
      options.graph_options(
          GraphOptions().side_streams(wrapping.side_streams).gradients("**", GradientPolicy::delayed));
    }
    make_engine(*model_, options);
  }
  ~WholeSteps() override { end(); }

  std::vector<at::Tensor> step(std::int64_t s) override {
    clear_gradients(*model_);
    if (engine_ && microbatches_.in_order) {
      Step in_order = engine_->step(microbatches_.order());
      forwards_and_backwards(s);
      in_order.finish();
    } else {
      in_step(engine_ ? &*engine_ : nullptr, [&] { forwards_and_backwards(s); });
    }
    std::vector<at::Tensor> results;
    for (const at::Tensor& parameter : model_->parameters()) {
      results.push_back(parameter.grad().clone());  // graphs may own it and add into it
    }
    descend(*model_);
    return results;
  }

 private:
  void forwards_and_backwards(std::int64_t s) {
    std::map<std::int64_t, at::Tensor> losses;  // by microbatch
    for (const PipelineStep& work : microbatches_.order()) {
      switch (work.kind) {
        case PipelineStep::Kind::forward: {
          const Batch batch = batch_of(model_->shape(), s * microbatches_.count + work.microbatch, device());
          const std::optional<Chunk> chunk =
              chunk_of(engine_ && microbatches_.in_order ? &*engine_ : nullptr, {0, work.microbatch});
          losses[work.microbatch] = model_->loss(batch.tokens, batch.targets);
          break;
        }
        case PipelineStep::Kind::backward:
          if (s % 2 == 0 || work.microbatch != microbatches_.drops) {
            losses[work.microbatch].backward();
          }
          losses.erase(work.microbatch);
          break;
        case PipelineStep::Kind::weight_gradients:
          if (engine_) {
            engine_->backward_dw({0, work.microbatch});
          }
          break;
      }
    }
  }

  Microbatches microbatches_;
  std::unique_ptr<BlockModel> model_;
};

std::vector<NamedProgram> wrapped_programs() {
  std::vector<NamedProgram> result;
  const auto add = [&](const std::string& name, const Wrapping& wrapping, Microbatches microbatches) {
    result.push_back(named_program<WholeSteps>(name, wrapping, microbatches));
  };
  for (const Wrapping& wrapping : wrappings()) {
    add(wrapping.name, wrapping, {});
  }
  add("eager_microbatches", Wrapping{"", "", "blocks.*.*"}, {2, 2});
  add("eager_1f1b", Wrapping{"", "", "blocks.*.*"}, {4, 2});
  add("graphs_2_microbatches", Wrapping{"", "blocks.*", "blocks.*.*", 2}, {2, 2});
  add("graphs_2_in_order", Wrapping{"", "blocks.*", "blocks.*.*", 2}, {4, 2, true});
  add("mixed_1_in_order", Wrapping{"", "blocks.1,blocks.2,blocks.3", "blocks.*.*", 1}, {5, 3, true});
  add("mixed_1_in_order_drops", Wrapping{"", "blocks.1,blocks.2,blocks.3", "blocks.*.*", 1}, {5, 3, true, 1});
  add("graphs_2_in_order_drops", Wrapping{"", "blocks.*", "blocks.*.*", 2}, {5, 3, true, 0});
  add("delayed_2_in_order", Wrapping{"", "blocks.*", "blocks.*.*", 2}, {4, 2, true, {}, true});
  add("mixed_1_microbatches", Wrapping{"", "blocks.0,blocks.3", "**", 1}, {2, 2});
  return result;
}

}  // namespace

const std::vector<NamedProgram>& programs() {
  static const std::vector<NamedProgram> all = [] {
    std::vector<NamedProgram> result = wrapped_programs();
    for (auto& more : {asked_programs(), stream_programs(), callable_programs(), callable_order_programs(),
                       output_programs(), between_programs(), drawing_programs(), whole_step_programs(),
                       pool_programs(), call_stream_programs(), pipeline_programs()}) {
      result.insert(result.end(), more.begin(), more.end());
    }
    return result;
  }();
  return all;
}

const NamedProgram& program(const std::string& name) {
  for (const NamedProgram& each : programs()) {
    if (each.name == name) {
      return each;
    }
  }
  throw std::logic_error("there is no program " + name);
}

}  // namespace sidestream::testing_model
