#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>

#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/adamw.h"
#include "sidestream/clip_grad.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_step.h"

namespace sidestream::testing_model {

/// The step function of a stack: its loss, and what it made.
inline Tensors stack_loss(torch::nn::SequentialImpl& model, const Tensors& inputs) {
  at::Tensor y = model.forward(inputs[0]);
  at::Tensor loss = (y * inputs[1]).sum();
  return {loss, y};
}

/// A trainer of whole steps: as plain training runs them, or as one graph.
struct WholeStepTrainer {
  struct Form {
    std::int64_t layers = 3;
    std::int64_t microbatches = 1;
    Mlp::Extras extras = {};
    bool updates = false;
    bool accumulate = false;
  };

  WholeStepTrainer(c10::Device on, const Form& as)
      : device(on), form(as), model(layer_stack(as.layers, on, as.extras)), optimizer(model->parameters(), 1e-2) {}

  [[nodiscard]] std::vector<Tensors> data(std::int64_t s) const {
    std::vector<Tensors> microbatches;
    for (std::int64_t m = 0; m < form.microbatches; ++m) {
      microbatches.push_back({rows(s, device, 2 * m), rows(s, device, 2 * m + 1)});
    }
    return microbatches;
  }

  void update() {
    (void)clip_grad_norm_(model->parameters(), 0.5);
    optimizer.step();
  }

  void graph(const Options& engine_options, StepOptions options = {}) {
    engine = std::make_unique<OffloadEngine>(*model, engine_options);
    if (form.updates) {
      options.update([this] { update(); });
    }
    options.accumulate(form.accumulate);
    step = std::make_unique<GraphedStep>(
        make_graphed_step(*engine, Callable("step", &stack_loss, model), data(1000), options));
  }

  /// `state`, and losses and outputs of each microbatch.
  StepTensors run(std::int64_t s) { return run(data(s)); }
  StepTensors run(const std::vector<Tensors>& microbatches) {
    std::vector<Tensors> made;
    if (step != nullptr) {
      made = (*step)(microbatches);
    } else {
      if (!form.accumulate) {
        clear_gradients(*model);
      }
      for (const Tensors& inputs : microbatches) {
        made.push_back(stack_loss(*model, inputs));
        made.back()[0].backward();
      }
      if (form.updates) {
        update();
      }
    }
    StepTensors result = state();
    for (const Tensors& outputs : made) {
      result.emplace_back("loss", outputs[0]);
      result.emplace_back("output", outputs[1]);
    }
    return result;
  }
  /// Gradients, buffers, parameters, and the optimizer's state.
  [[nodiscard]] StepTensors state() const {
    StepTensors result = gradients_and_buffers(*model);
    for (const auto& parameter : model->named_parameters()) {
      result.emplace_back("parameter " + parameter.key(), parameter.value());
    }
    for (const auto& [name, tensor] : optimizer.named_state()) {
      result.emplace_back("state " + name, tensor);
    }
    return result;
  }

  c10::Device device;
  Form form;
  torch::nn::Sequential model;
  AdamW optimizer;
  std::unique_ptr<OffloadEngine> engine;
  std::unique_ptr<GraphedStep> step;
};

}  // namespace sidestream::testing_model
