// Programs whose graphed calls are made on several streams.
#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "models/scopes.h"
#include "unit/graphs/engine_program.h"

namespace sidestream::testing_model {
namespace {

/// Layers that were captured together and take nothing of each other are called on two streams in turn, and nothing orders the
/// streams.
class CallsOnTwoStreams final : public StackProgram {
 public:
  explicit CallsOnTwoStreams(const Runtimes& runtimes) : StackProgram(runtimes, kLayers), streams_(runtime()) {
    if (make_engine(*model_, stack_options())) {
      capture_linked(callables(0, kLayers), GraphOptions().side_streams(2), [](std::size_t /*layer*/) { return true; });
    }
    for (std::int64_t i = 0; i < 4 * static_cast<std::int64_t>(kLayers); ++i) {
      inputs_.push_back(rows_of(i).requires_grad_(true));
    }
    runtime().synchronize_device();
  }
  ~CallsOnTwoStreams() override { end(); }

  std::vector<at::Tensor> step(std::int64_t s) override {
    std::array<at::Tensor, kLayers> losses;
    for (std::size_t i = 0; i < kLayers; ++i) {
      const c10::StreamGuard on_stream(streams_.by_turns(static_cast<std::int64_t>(i)));
      const at::Tensor& x = input(s, i);
      losses[i] = run(i, i + 1, x).sum();
    }
    std::vector<at::Tensor> gradients;
    for (std::size_t i = kLayers; i-- > 0;) {
      const c10::StreamGuard on_stream(streams_.by_turns(static_cast<std::int64_t>(i)));
      std::vector<at::Tensor> of{input(s, i)};
      for (const at::Tensor& parameter : layer(i).ptr()->parameters()) {
        of.push_back(parameter);
      }
      for (at::Tensor& gradient : torch::autograd::grad({losses[i]}, of)) {
        gradients.push_back(std::move(gradient));
      }
    }
    return gradients;
  }

 private:
  static constexpr std::size_t kLayers = 5;
  [[nodiscard]] const at::Tensor& input(std::int64_t s, std::size_t i) const {
    return inputs_[(kLayers * static_cast<std::size_t>(s) + i) % inputs_.size()];
  }

  StreamPair streams_;
  std::vector<at::Tensor> inputs_;
};

/// A loader makes the next batch on a stream of its own while the batch before is used, and waits for the backward before that batch's memory
/// is free. In plain training autograd keeps the batch until then. A call copies it, and its memory is free when the program lets it go.
class CallsOfALoadersBatch final : public StackProgram {
 public:
  explicit CallsOfALoadersBatch(const Runtimes& runtimes) : StackProgram(runtimes, kLayers), streams_(runtime()) {
    if (make_engine(*model_, stack_options())) {
      capture_linked(callables(0, kLayers), GraphOptions().side_streams(2));
    }
    for (std::int64_t i = 0; i < 8; ++i) {
      inputs_.push_back(rows_of(i).requires_grad_(true));  // a batch is no leaf: autograd would keep that
    }
    runtime().synchronize_device();
  }
  ~CallsOfALoadersBatch() override { end(); }

  std::vector<at::Tensor> step(std::int64_t s) override {
    at::Tensor batch = load(s);
    streams_.order(streams_.b(), streams_.a());
    const c10::StreamGuard on_a(streams_.a());
    const at::Tensor loss = run(0, kLayers, std::exchange(batch, at::Tensor())).sum();
    const at::Tensor next = load(s + 1);
    std::vector<at::Tensor> results = torch::autograd::grad({loss}, model_->parameters(), {}, true);
    streams_.order(streams_.a(), streams_.b());
    results.push_back(next);
    return results;
  }

 private:
  static constexpr std::size_t kLayers = 3;
  [[nodiscard]] at::Tensor load(std::int64_t s) {
    const c10::StreamGuard on_b(streams_.b());
    return inputs_[static_cast<std::size_t>(s) % inputs_.size()] * 2;
  }

  StreamPair streams_;
  std::vector<at::Tensor> inputs_;
};

/// The forward runs on one stream, and `backward()` and `backward_dw` are called on another. An optimizer on the first stream unsets
/// the gradients, and later work of the second takes memory.
class WeightsFromAnotherStream final : public StackProgram {
 public:
  explicit WeightsFromAnotherStream(const Runtimes& runtimes) : StackProgram(runtimes, kLayers), streams_(runtime()) {
    if (make_engine(*model_, stack_options())) {
      capture_linked(callables(0, kLayers), GraphOptions().gradients("**", GradientPolicy::delayed));
    }
    runtime().synchronize_device();
  }
  ~WeightsFromAnotherStream() override { end(); }

  std::vector<at::Tensor> step(std::int64_t s) override {
    const c10::StreamGuard on_b(streams_.b());
    const at::Tensor x = rows_of(s).requires_grad_(true);
    std::vector<at::Tensor> results;
    streams_.order(streams_.b(), streams_.a());
    at::Tensor loss;
    {
      const c10::StreamGuard on_a(streams_.a());
      loss = run(0, kLayers, x).sum();
    }
    loss.backward();
    if (engine_) {
      engine_->backward_dw();
    }
    for (const at::Tensor& parameter : model_->parameters()) {
      results.push_back(parameter.grad() * 0.25);
    }
    streams_.order(streams_.b(), streams_.a());
    {
      const c10::StreamGuard on_a(streams_.a());
      for (const at::Tensor& parameter : model_->parameters()) {
        results.push_back(parameter.grad() * 0.5);
      }
      model_->zero_grad();
    }
    for (int i = 0; i < 8; ++i) {
      results.push_back(x.detach() * (1.5 + i));
    }
    streams_.order(streams_.a(), streams_.b());
    return results;
  }

 private:
  static constexpr std::size_t kLayers = 3;
  StreamPair streams_;
};

/// Passes on no gradient.
struct Dropped : torch::autograd::Function<Dropped> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) { return x * 2; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 const torch::autograd::variable_list& /*gradients*/) {
    return {at::Tensor()};
  }
};

/// A call adds into `.grad`, and its input gets no gradient, or one that a later node drops: autograd has no leaf to wait for. The forward
/// runs on one stream, and `backward()` is called on another, which reads the gradient.
class OnlyAddsIntoGrad final : public EngineProgram {
 public:
  OnlyAddsIntoGrad(const Runtimes& runtimes, bool dropped)
      : EngineProgram(runtimes), dropped_(dropped), streams_(runtime()), weight_(rows_of(99).requires_grad_(true)) {
    body_ = [weight = weight_](const Tensors& inputs) {
      return Tensors{inputs[0] * 2, (weight * 0.5).tanh().exp() * weight};
    };
    if (make_engine(model_, Options(device()).min_bytes(1024).groups_in_flight(1).offload("**"))) {
      layers_ = make_graphed_callables(*engine_, {Callable("call", owning(body_))}, {{rows_of(0).requires_grad_(true)}},
                                       GraphOptions().gradients("call", GradientPolicy::accumulated));
    }
    runtime().synchronize_device();
  }
  ~OnlyAddsIntoGrad() override { end(); }

  std::vector<at::Tensor> step(std::int64_t s) override {
    const c10::StreamGuard on_b(streams_.b());
    const auto step = step_of_engine();
    weight_.mutable_grad() = at::Tensor();
    const at::Tensor x = rows_of(s).requires_grad_(true) * 1.5;
    const at::Tensor seed = rows_of(s, 1);
    streams_.order(streams_.b(), streams_.a());
    at::Tensor loss;
    {
      const c10::StreamGuard on_a(streams_.a());
      const at::Tensor input = dropped_ ? Dropped::apply(x) : x;
      const Tensors outputs = engine_ ? layers_[0]({input}) : body_({input});
      loss = through_scopes((dropped_ ? outputs[0] + outputs[1] : outputs[1]) * seed).sum();
    }
    loss.backward();
    std::vector<at::Tensor> results{weight_.grad() + 0.0};  // a graph adds to zeros, so it has no -0
    streams_.order(streams_.b(), streams_.a());
    return results;
  }

 private:
  bool dropped_;
  StreamPair streams_;
  at::Tensor weight_;
  TensorFunction body_;
  torch::nn::Module model_;
};

/// The accumulator of a weight is on stream a, where the step begins. A graph adds into `.grad` on the default stream, and another graph or
/// an eager reader on stream a, in one backward().
class AddsOnDefaultStream final : public EngineProgram {
 public:
  AddsOnDefaultStream(const Runtimes& runtimes, bool eager_reader)
      : EngineProgram(runtimes),
        eager_reader_(eager_reader),
        streams_(runtime()),
        weight_(rows_of(99).requires_grad_(true)) {
    // One use of the weight: with several, plain training adds in another order.
    body_ = [weight = weight_](const Tensors& inputs) { return Tensors{inputs[0] * (weight * 0.5).tanh().exp()}; };
    streams_.order(runtime().current_stream(), streams_.a());
    const c10::StreamGuard on_a(streams_.a());
    if (make_engine(model_, Options(device()).min_bytes(1024).groups_in_flight(1).offload("**"))) {
      for (const char* name : {"one", "two"}) {
        layers_.push_back(make_graphed_callables(*engine_, {Callable(name, owning(body_))}, {{rows_of(0)}},
                                                 GraphOptions().gradients("**", GradientPolicy::accumulated))[0]);
      }
    }
    runtime().synchronize_device();
  }
  ~AddsOnDefaultStream() override { end(); }

  std::vector<at::Tensor> step(std::int64_t s) override {
    const c10::Stream main = runtime().current_stream();
    streams_.order(main, streams_.a());
    streams_.order(streams_.b(), streams_.a());
    streams_.order(streams_.b(), main);
    weight_.mutable_grad() = at::Tensor();
    std::optional<Step> step;
    at::Tensor one;
    {
      const c10::StreamGuard on_a(streams_.a());
      if (engine_) {
        step.emplace(engine_->step());
      }
      const at::Tensor x = rows_of(s, 0);
      one = ((engine_ && !eager_reader_ ? layers_[0]({x}) : body_({x}))[0] * rows_of(s, 1)).sum();
    }
    const at::Tensor x = rows_of(s, 2);
    const at::Tensor two = through_scopes((engine_ ? layers_[1]({x}) : body_({x}))[0] * rows_of(s, 3)).sum();
    streams_.order(main, streams_.b());
    streams_.order(streams_.a(), streams_.b());
    std::vector<at::Tensor> results;
    {
      const c10::StreamGuard on_b(streams_.b());
      one.record_stream(streams_.b());
      two.record_stream(streams_.b());
      at::globalContext().setWarnOnAccumulateGradStreamMismatch(false);  // plain training's warning of two streams
      (one + two).backward();
      at::globalContext().setWarnOnAccumulateGradStreamMismatch(true);
      results.push_back(weight_.grad().clone());
    }
    streams_.order(streams_.b(), main);
    streams_.order(streams_.b(), streams_.a());
    const c10::StreamGuard on_a(streams_.a());
    step.reset();
    return results;
  }

 private:
  bool eager_reader_;
  StreamPair streams_;
  at::Tensor weight_;
  TensorFunction body_;
  torch::nn::Module model_;
};

/// A `.grad` that a graph has added into outlives the graph. The stream of the backward reads it, and then it is unset.
class GradOutlivesItsGraph final : public EngineProgram {
 public:
  explicit GradOutlivesItsGraph(const Runtimes& runtimes) : EngineProgram(runtimes), streams_(runtime()) {
    for (std::size_t i = 0; i < kSteps; ++i) {
      models_.push_back(layer_stack(1, device()));
    }
    if (make_engine(*models_[0], Options(device()).min_bytes(1024).offload("**"))) {
      for (std::size_t i = 0; i < kSteps; ++i) {
        layers_.push_back(make_graphed_callables(*engine_, {Callable("call" + std::to_string(i), &run, models_[i])},
                                                 {{rows_of(100)}},
                                                 GraphOptions().gradients("**", GradientPolicy::accumulated))[0]);
      }
    }
    runtime().synchronize_device();
  }
  ~GradOutlivesItsGraph() override { end(); }

  std::vector<at::Tensor> step(std::int64_t s) override {
    const auto step = step_of_engine();
    const auto index = static_cast<std::size_t>(s);
    torch::nn::Sequential& model = models_.at(index);
    std::vector<at::Tensor> results;
    {
      const c10::StreamGuard on_a(streams_.a());
      const Tensors inputs{rows_of(s)};
      through_scopes((engine_ ? layers_[index](inputs) : run(*model, inputs))[0]).sum().backward();
    }
    if (engine_) {
      layers_[index].reset();
    }
    {
      const c10::StreamGuard on_a(streams_.a());
      for (const at::Tensor& parameter : model->parameters()) {
        results.push_back(parameter.grad() * 0.5);
      }
    }
    model->zero_grad();
    for (const at::Tensor& parameter : model->parameters()) {
      results.push_back(at::full_like(parameter, 7));
      results.push_back(at::full_like(parameter, 8));
    }
    return results;
  }

 private:
  static constexpr std::size_t kSteps = 8;
  static Tensors run(torch::nn::SequentialImpl& model, const Tensors& inputs) { return {model.forward(inputs[0])}; }

  StreamPair streams_;
  std::vector<torch::nn::Sequential> models_;
};

}  // namespace

std::vector<NamedProgram> call_stream_programs() {
  return {named_program<CallsOnTwoStreams>("calls_on_two_streams"),
          named_program<CallsOfALoadersBatch>("calls_of_a_loaders_batch"),
          named_program<WeightsFromAnotherStream>("weights_from_another_stream"),
          named_program<OnlyAddsIntoGrad>("only_adds_into_grad", false),
          named_program<OnlyAddsIntoGrad>("adds_into_grad_and_is_dropped", true),
          named_program<AddsOnDefaultStream>("two_graphs_add_on_two_streams", false),
          named_program<AddsOnDefaultStream>("adds_on_the_default_stream", true),
          named_program<GradOutlivesItsGraph>("grad_outlives_its_graph")};
}

}  // namespace sidestream::testing_model
