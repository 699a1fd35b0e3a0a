// Programs whose eager heads save outputs that graphs of the sequence use the memory of again: the outputs leave with the heads' groups.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <torch/nn/module.h>

#include "graphs/engine/engine_access.h"
#include "models/layer_stack.h"
#include "models/wave.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/scope.h"
#include "unit/graphs/ordered_programs.h"

namespace sidestream::testing_model {
namespace {

constexpr std::size_t kLayers = 6;

/// A head behind each layer, which saves that layer's output.
class EagerHeads final : public Program {
 public:
  explicit EagerHeads(const Runtimes& runtimes) : runtime_(runtimes.model) {
    for (std::size_t i = 0; i < kLayers; ++i) {
      waves_.push_back(std::make_shared<Wave>(static_cast<std::int64_t>(i)));
      model_.register_module(std::to_string(i), waves_.back());
    }
    model_.to(runtime_->device());
    if (runtimes.engine != nullptr) {
      engine_.emplace(
          EngineAccess::engine(model_, Options(runtime_->device()).offload("heads").min_bytes(1024), runtimes.engine));
      std::vector<Callable> callables;
      std::vector<std::vector<Sample>> samples;
      for (std::size_t i = 0; i < kLayers; ++i) {
        callables.emplace_back(
            "waves." + std::to_string(i), [](Wave& wave, const Tensors& in) { return Tensors{wave.forward(in[0])}; },
            waves_[i]);
        samples.push_back({i == 0 ? Sample(rows(50, runtime_->device()).requires_grad_(true))
                                  : Sample::output_of(static_cast<std::int64_t>(i) - 1)});
      }
      layers_ = make_graphed_callables(*engine_, callables, samples, GraphOptions());
    }
    runtime_->synchronize_device();
  }
  ~EagerHeads() override { runtime_->synchronize_device(); }
  [[nodiscard]] const OffloadEngine* engine() const override { return engine_ ? &*engine_ : nullptr; }

  std::vector<at::Tensor> step(std::int64_t s) override {
    std::optional<Step> active;
    if (engine_) {
      active.emplace(engine_->step());
    }
    model_.zero_grad();
    const at::Tensor x = rows(s, runtime_->device()).requires_grad_(true);
    at::Tensor h = x;
    at::Tensor loss = x.mean();
    for (std::size_t i = 0; i < kLayers; ++i) {
      h = engine_ ? layers_[i]({h})[0] : waves_[i]->forward(h);
      const OffloadScope scope("heads");
      loss = loss + h.cos().mul(h).mean();
    }
    h = at::Tensor();
    loss.backward();
    std::vector<at::Tensor> gradients = {x.grad()};
    for (const at::Tensor& parameter : model_.parameters()) {
      gradients.push_back(parameter.grad());
    }
    return gradients;
  }

 private:
  std::shared_ptr<Runtime> runtime_;
  std::vector<std::shared_ptr<Wave>> waves_;
  torch::nn::Module model_;
  std::optional<OffloadEngine> engine_;
  std::vector<GraphedCallable> layers_;
};

}  // namespace

std::vector<NamedProgram> eager_head_programs() {
  return {{"eager_heads", [](const Runtimes& runtimes) -> std::unique_ptr<Program> {
             return std::make_unique<EagerHeads>(runtimes);
           }}};
}

}  // namespace sidestream::testing_model
