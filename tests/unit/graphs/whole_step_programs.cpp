// Programs whose whole step is one graph.
#include <optional>

#include <ATen/Functions.h>

#include "sidestream/graphed_step.h"
#include "unit/graphs/engine_program.h"

namespace sidestream::testing_model {
namespace {

/// Layers whose scopes leave inside of the step's graph.
class OneGraphSteps final : public EngineProgram {
 public:
  struct Form {
    std::size_t microbatches;
    std::optional<std::size_t> lag;
    bool updates;
  };

  OneGraphSteps(const Runtimes& runtimes, const Form& form)
      : EngineProgram(runtimes), form_(form), model_(layer_stack(kLayers, device())) {
    Options options = Options(device()).offload("**").min_bytes(1024);
    if (form.lag) {
      options.lag(*form.lag);
    }
    if (!make_engine(*model_, options)) {
      return;
    }
    StepOptions step_options;
    if (form.updates) {
      step_options.update([this] { descend_slowly(); });
    }
    step_.emplace(make_graphed_step(*engine_, Callable("step", &loss, model_), data(100), step_options));
  }
  ~OneGraphSteps() override {
    runtime().synchronize_device();
    step_.reset();
    end();
  }

  std::vector<at::Tensor> step(std::int64_t s) override {
    std::vector<at::Tensor> results;
    if (step_) {
      for (const Tensors& outputs : (*step_)(data(s))) {
        results.push_back(outputs[0]);
      }
    } else {
      model_->zero_grad();
      for (const Tensors& inputs : data(s)) {
        results.push_back(loss(*model_, inputs)[0]);
        results.back().backward();
      }
      if (form_.updates) {
        descend_slowly();
      }
    }
    for (at::Tensor& result : results) {
      result = result.detach();
    }
    for (const at::Tensor& parameter : model_->parameters()) {
      results.push_back(parameter.grad().clone());  // the next replay writes it
    }
    return results;
  }

 private:
  static constexpr std::int64_t kLayers = 4;

  static Tensors loss(torch::nn::SequentialImpl& model, const Tensors& inputs) {
    return {(model.forward(inputs[0]) * inputs[1]).sum()};
  }
  [[nodiscard]] std::vector<Tensors> data(std::int64_t s) const {
    std::vector<Tensors> microbatches;
    for (std::size_t m = 0; m < form_.microbatches; ++m) {
      const auto salt = static_cast<std::int64_t>(2 * m);
      microbatches.push_back({rows_of(s, salt), rows_of(s, salt + 1)});
    }
    return microbatches;
  }
  void descend_slowly() {
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : model_->parameters()) {
      parameter.add_(parameter.grad(), -0.01);
    }
  }

  Form form_;
  torch::nn::Sequential model_;
  std::optional<GraphedStep> step_;
};

}  // namespace

std::vector<NamedProgram> whole_step_programs() {
  using Form = OneGraphSteps::Form;
  return {named_program<OneGraphSteps>("one_graph", Form{1, std::nullopt, false}),
          named_program<OneGraphSteps>("one_graph_no_lag", Form{1, 0, true}),
          named_program<OneGraphSteps>("one_graph_microbatches", Form{3, std::nullopt, true})};
}

}  // namespace sidestream::testing_model
