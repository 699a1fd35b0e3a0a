// Programs whose eager code alone takes the outputs of graphed calls, and saves them between one call and the next.
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/Functions.h>

#include "graphs/engine/engine_access.h"
#include "models/layer_stack.h"
#include "models/wave.h"
#include "sidestream/call.h"
#include "sidestream/engine.h"
#include "sidestream/scope.h"
#include "unit/graphs/ordered_programs.h"

namespace sidestream::testing_model {
namespace {

struct Kind {
  std::int64_t in_flight = 1;  ///< microbatches of a step
  bool leaves = true;          ///< what saves the outputs is offloaded; else nothing saves them, and what calls save is
  bool holds = false;          ///< from the third step on the program holds each second output until the step's end
};

class Between final : public Program {
 public:
  Between(const Runtimes& runtimes, Kind kind) : runtime_(runtimes.model), kind_(kind) {
    if (runtimes.engine != nullptr) {
      engine_.emplace(EngineAccess::engine(
          model_,
          Options(runtime_->device()).graph("waves.*").offload(kind_.leaves ? "between" : "waves.*").min_bytes(1024),
          runtimes.engine));
    }
    runtime_->synchronize_device();
  }
  ~Between() override { runtime_->synchronize_device(); }
  [[nodiscard]] const OffloadEngine* engine() const override { return engine_ ? &*engine_ : nullptr; }

  std::vector<at::Tensor> step(std::int64_t s) override {
    std::optional<Step> active;
    if (engine_) {
      active.emplace(engine_->step());
    }
    model_.zero_grad();
    std::vector<at::Tensor> results;
    std::vector<at::Tensor> losses;
    std::vector<at::Tensor> inputs;
    for (std::int64_t microbatch = 0; microbatch < kind_.in_flight; ++microbatch) {
      inputs.push_back(rows(s * kind_.in_flight + microbatch, runtime_->device()).requires_grad_(true));
      at::Tensor h = inputs.back();
      for (std::int64_t i = 0; i < Waves::kCount; ++i) {
        h = call(&*model_.layer(i), h);
        if (kind_.holds && s > 1 && i % 2 == 0) {
          results.push_back(h.detach());
        }
        h = between(h);
      }
      losses.push_back(h.mean());
    }
    for (at::Tensor& loss : losses) {
      loss.backward();
    }
    for (const at::Tensor& input : inputs) {
      results.push_back(input.grad());
    }
    for (const at::Tensor& parameter : model_.parameters()) {
      results.push_back(parameter.grad());
    }
    return results;
  }

 private:
  [[nodiscard]] at::Tensor between(const at::Tensor& output) const {
    if (!kind_.leaves) {
      return output * 0.5;
    }
    const OffloadScope scope("between");
    return output.cos().mul(output);
  }

  std::shared_ptr<Runtime> runtime_;
  Kind kind_;
  Waves model_{runtime_->device()};
  std::optional<OffloadEngine> engine_;
};

}  // namespace

std::vector<NamedProgram> between_programs() {
  std::vector<NamedProgram> result;
  for (const auto& [name, kind] : {std::pair("between_calls", Kind{}), std::pair("between_calls_2", Kind{2}),
                                   std::pair("between_calls_held", Kind{1, true, true}),
                                   std::pair("between_calls_unsaved_held", Kind{1, false, true})}) {
    result.push_back({name, [kind = kind](const Runtimes& runtimes) -> std::unique_ptr<Program> {
                        return std::make_unique<Between>(runtimes, kind);
                      }});
  }
  return result;
}

}  // namespace sidestream::testing_model
