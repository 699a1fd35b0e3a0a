#include "unit/graphs/ordered_programs.h"

#include <deque>
#include <optional>
#include <stdexcept>
#include <utility>

#include "graphs/engine/engine_access.h"
#include "models/block_model.h"
#include "models/waves.h"
#include "models/wrapping.h"
#include "sidestream/engine.h"

namespace sidestream::testing_model {
namespace {

/// Microbatches of a step, and how many forwards may wait for their backward. Behind the last of these, one forward and one
/// backward take turns, as in a pipeline.
struct Microbatches {
  std::int64_t count = 1;
  std::size_t in_flight = 1;
};

/// Whole steps of a BlockModel, weights changing from step to step.
class WholeSteps : public Program {
 public:
  WholeSteps(const Runtimes& runtimes, const Wrapping& wrapping, Microbatches microbatches)
      : device_(runtimes.model->device()), microbatches_(microbatches) {
    BlockModel::Shape shape;
    shape.layers = 5;
    model_ = std::make_unique<BlockModel>(shape);
    model_->to(device_);
    if (runtimes.engine != nullptr) {
      engine_.emplace(EngineAccess::engine(*model_, wrapping.options(device_, 1024), runtimes.engine));
    }
  }

  std::vector<at::Tensor> step(std::int64_t s) override {
    clear_gradients(*model_);
    in_step(engine_ ? &*engine_ : nullptr, [&] { forwards_and_backwards(s); });
    std::vector<at::Tensor> results;
    for (const at::Tensor& parameter : model_->parameters()) {
      results.push_back(parameter.grad().clone());  // graphs may own it and add into it
    }
    descend(*model_);
    return results;
  }
  [[nodiscard]] const OffloadEngine* engine() const override { return engine_ ? &*engine_ : nullptr; }

 private:
  void forwards_and_backwards(std::int64_t s) {
    std::deque<at::Tensor> losses;
    for (std::int64_t microbatch = 0; microbatch < microbatches_.count; ++microbatch) {
      const Batch batch = batch_of(model_->shape(), s * microbatches_.count + microbatch, device_);
      losses.push_back(model_->loss(batch.tokens, batch.targets));
      if (losses.size() == microbatches_.in_flight) {
        losses.front().backward();
        losses.pop_front();
      }
    }
    for (at::Tensor& loss : losses) {
      loss.backward();
      loss.reset();
    }
  }

  c10::Device device_;
  Microbatches microbatches_;
  std::unique_ptr<BlockModel> model_;
  std::optional<OffloadEngine> engine_;
};

/// What each call saves lies in storages that leave as one block.
class GatheredWaves final : public Program {
 public:
  GatheredWaves(const Runtimes& runtimes, std::int64_t side_streams) : device_(runtimes.model->device()) {
    if (runtimes.engine != nullptr) {
      constexpr std::size_t kMinBytes = 6000;
      engine_.emplace(
          EngineAccess::engine(model_, wave_options(device_, side_streams).min_bytes(kMinBytes), runtimes.engine));
    }
  }
  std::vector<at::Tensor> step(std::int64_t s) override {
    constexpr std::int64_t kRows = 16;  // 4,096 bytes, and a call saves two of it
    const at::Tensor x = wave_input(static_cast<std::uint64_t>(s), kRows, device_);
    at::Tensor gradient;
    in_step(engine_ ? &*engine_ : nullptr, [&] { gradient = wave_gradient(x); });
    return {gradient};
  }
  [[nodiscard]] const OffloadEngine* engine() const override { return engine_ ? &*engine_ : nullptr; }

 private:
  c10::Device device_;
  torch::nn::Module model_;
  std::optional<OffloadEngine> engine_;
};

std::vector<NamedProgram> wrapped_programs() {
  std::vector<NamedProgram> result;
  const auto add = [&](const std::string& name, const Wrapping& wrapping, Microbatches microbatches) {
    result.push_back({name, [wrapping, microbatches](const Runtimes& runtimes) -> std::unique_ptr<Program> {
                        return std::make_unique<WholeSteps>(runtimes, wrapping, microbatches);
                      }});
  };
  for (const Wrapping& wrapping : wrappings()) {
    add(wrapping.name, wrapping, {});
  }
  add("eager_microbatches", Wrapping{"", "", "blocks.*.*"}, {2, 2});
  add("eager_1f1b", Wrapping{"", "", "blocks.*.*"}, {4, 2});
  add("graphs_2_microbatches", Wrapping{"", "blocks.*", "blocks.*.*", 2}, {2, 2});
  add("mixed_1_microbatches", Wrapping{"", "blocks.0,blocks.3", "**", 1}, {2, 2});
  for (const auto& [name, side_streams] : {std::pair("eager_gathered", 0), std::pair("graphs_2_gathered", 2)}) {
    result.push_back({name, [side_streams = side_streams](const Runtimes& runtimes) -> std::unique_ptr<Program> {
                        return std::make_unique<GatheredWaves>(runtimes, side_streams);
                      }});
  }
  return result;
}

}  // namespace

const std::vector<NamedProgram>& programs() {
  static const std::vector<NamedProgram> all = [] {
    std::vector<NamedProgram> result = wrapped_programs();
    for (auto& more :
         {stream_programs(), callable_programs(), output_programs(), eager_head_programs(), between_programs(),
          drawing_programs(), whole_step_programs(), pool_programs(), call_stream_programs()}) {
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
