// Programs whose eager code saves the outputs of graphed calls: between one call and the next, or beside the next call.
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>

#include "models/wave.h"
#include "sidestream/call.h"
#include "sidestream/scope.h"
#include "unit/graphs/engine_program.h"

namespace sidestream::testing_model {
namespace {

struct Kind {
  std::int64_t in_flight = 1;  ///< microbatches of a step
  bool leaves = true;          ///< what saves the outputs is offloaded; else nothing saves them, and what calls save is
  bool holds = false;          ///< from the third step on the program holds each second output until the step's end
};

class Between final : public EngineProgram {
 public:
  Between(const Runtimes& runtimes, Kind kind) : EngineProgram(runtimes), kind_(kind) {
    make_engine(model_,
                Options(device()).graph("waves.*").offload(kind_.leaves ? "between" : "waves.*").min_bytes(1024));
    runtime().synchronize_device();
  }
  ~Between() override { end(); }

  std::vector<at::Tensor> step(std::int64_t s) override {
    const auto active = step_of_engine();
    model_.zero_grad();
    std::vector<at::Tensor> results;
    std::vector<at::Tensor> losses;
    std::vector<at::Tensor> inputs;
    for (std::int64_t microbatch = 0; microbatch < kind_.in_flight; ++microbatch) {
      inputs.push_back(rows_of(s * kind_.in_flight + microbatch).requires_grad_(true));
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

  Kind kind_;
  Waves model_{device()};
};

/// A head behind each layer, which saves that layer's output: graphs of the sequence use its memory again.
class EagerHeads final : public EngineProgram {
 public:
  explicit EagerHeads(const Runtimes& runtimes) : EngineProgram(runtimes) {
    if (make_engine(model_, Options(device()).offload("heads").min_bytes(1024))) {
      std::vector<Callable> callables;
      for (std::int64_t i = 0; i < kLayers; ++i) {
        callables.emplace_back(
            "waves." + std::to_string(i), [](Wave& wave, const Tensors& in) { return Tensors{wave.forward(in[0])}; },
            model_.layer(i));
      }
      capture_linked(callables);
    }
    runtime().synchronize_device();
  }
  ~EagerHeads() override { end(); }

  std::vector<at::Tensor> step(std::int64_t s) override {
    const auto active = step_of_engine();
    model_.zero_grad();
    const at::Tensor x = rows_of(s).requires_grad_(true);
    at::Tensor h = x;
    at::Tensor loss = x.mean();
    for (std::int64_t i = 0; i < kLayers; ++i) {
      h = engine_ ? layers_[static_cast<std::size_t>(i)]({h})[0] : model_.layer(i)->forward(h);
      const OffloadScope scope("heads");
      loss = loss + h.cos().mul(h).mean();
    }
    h = at::Tensor();
    loss.backward();
    std::vector<at::Tensor> gradients = {x.grad()};
    for (std::int64_t i = 0; i < kLayers; ++i) {
      for (const at::Tensor& parameter : model_.layer(i)->parameters()) {
        gradients.push_back(parameter.grad());
      }
    }
    return gradients;
  }

 private:
  static constexpr std::int64_t kLayers = 6;

  Waves model_{device()};
};

}  // namespace

std::vector<NamedProgram> between_programs() {
  std::vector<NamedProgram> result;
  for (const auto& [name, kind] : {std::pair("between_calls", Kind{}), std::pair("between_calls_2", Kind{2}),
                                   std::pair("between_calls_held", Kind{1, true, true}),
                                   std::pair("between_calls_unsaved_held", Kind{1, false, true})}) {
    result.push_back(named_program<Between>(name, kind));
  }
  result.push_back(named_program<EagerHeads>("eager_heads"));
  return result;
}

}  // namespace sidestream::testing_model
