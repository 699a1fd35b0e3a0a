// Programs whose whole step is one graph.
#include <optional>

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>

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

/// Steps that are made on more than one stream. `accumulates`: each adds to the gradients that are there.
class OneGraphOnStreams : public EngineProgram, protected StreamPair {
 public:
  OneGraphOnStreams(const Runtimes& runtimes, bool accumulates)
      : EngineProgram(runtimes), StreamPair(runtime()), model_(layer_stack(/*layers=*/2, device())) {
    if (make_engine(*model_, Options(device()).offload("**").min_bytes(1024))) {
      step_.emplace(make_graphed_step(*engine_, Callable("step", &loss, model_), {data(100)},
                                      StepOptions().accumulate(accumulates)));
    }
    runtime().synchronize_device();
  }
  ~OneGraphOnStreams() override {
    runtime().synchronize_device();
    step_.reset();
    other_.reset();
    end();
  }

 protected:
  void make_other_step() {
    if (engine_) {
      other_.emplace(make_graphed_step(*engine_, Callable("other", &loss, model_), {data(100)}));
    }
  }
  /// On the current stream. Returns copies of the gradients: the next step writes them. `other`: with the other graphed step.
  std::vector<at::Tensor> train(std::int64_t s, bool other = false) {
    if (step_) {
      (void)(other ? *other_ : *step_)({data(s)});
    } else {
      loss(*model_, data(s))[0].backward();
    }
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : model_->parameters()) {
      gradients.push_back(parameter.grad().clone());
    }
    return gradients;
  }

  torch::nn::Sequential model_;

 private:
  static Tensors loss(torch::nn::SequentialImpl& model, const Tensors& inputs) {
    return {(model.forward(inputs[0]) * inputs[1]).sum()};
  }
  [[nodiscard]] Tensors data(std::int64_t s) const { return {rows_of(s, 0), rows_of(s, 1)}; }

  std::optional<GraphedStep> step_, other_;
};

/// Two graphed steps of one engine, on two streams that never meet.
class TwoGraphsInTurn final : public OneGraphOnStreams {
 public:
  explicit TwoGraphsInTurn(const Runtimes& runtimes) : OneGraphOnStreams(runtimes, /*accumulates=*/false) {
    make_other_step();
    runtime().synchronize_device();
  }
  std::vector<at::Tensor> step(std::int64_t s) override {
    const c10::StreamGuard on_stream(by_turns(s));
    model_->zero_grad();
    return train(s, /*other=*/s % 2 != 0);
  }
};

/// Steps on two streams in turn that never meet. Some steps run eagerly, as the model has another mode then.
class OneGraphInTurn final : public OneGraphOnStreams {
 public:
  using OneGraphOnStreams::OneGraphOnStreams;
  std::vector<at::Tensor> step(std::int64_t s) override {
    const c10::StreamGuard on_stream(by_turns(s));
    model_->train(s % 3 != 2);
    model_->zero_grad();
    return train(s);
  }
};

/// Another stream makes the gradients that a step adds to, and takes memory after the step.
class OneGraphAddsToOthers final : public OneGraphOnStreams {
 public:
  explicit OneGraphAddsToOthers(const Runtimes& runtimes) : OneGraphOnStreams(runtimes, /*accumulates=*/true) {}
  std::vector<at::Tensor> step(std::int64_t s) override {
    order(a(), b());
    const c10::StreamGuard on_b(b());
    for (at::Tensor& parameter : model_->parameters()) {
      parameter.mutable_grad() = at::full_like(parameter, 0.25 * static_cast<double>(s + 1));
    }
    order(b(), a());
    std::vector<at::Tensor> results = [&] {
      const c10::StreamGuard on_a(a());
      return train(s);
    }();
    for (const at::Tensor& parameter : model_->parameters()) {
      results.push_back(at::full_like(parameter, 7));
    }
    return results;
  }
};

}  // namespace

std::vector<NamedProgram> whole_step_programs() {
  using Form = OneGraphSteps::Form;
  return {named_program<OneGraphSteps>("one_graph", Form{1, std::nullopt, false}),
          named_program<OneGraphSteps>("one_graph_no_lag", Form{1, 0, true}),
          named_program<OneGraphSteps>("one_graph_microbatches", Form{3, std::nullopt, true}),
          named_program<OneGraphInTurn>("one_graph_in_turn", false),
          named_program<OneGraphInTurn>("one_graph_adds_in_turn", true),
          named_program<TwoGraphsInTurn>("two_graphs_in_turn"),
          named_program<OneGraphAddsToOthers>("one_graph_adds_to_others")};
}

}  // namespace sidestream::testing_model
