// Programs whose graphed calls are made on several streams.
#include <array>
#include <utility>

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/autograd.h>

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

/// A call adds into `.grad` and its input gets no gradient: autograd has no leaf to wait for. The forward runs on one stream, and
/// `backward()` is called on another, which reads the gradient.
class OnlyAddsIntoGrad final : public EngineProgram {
 public:
  explicit OnlyAddsIntoGrad(const Runtimes& runtimes)
      : EngineProgram(runtimes), streams_(runtime()), weight_(rows_of(99).requires_grad_(true)) {
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
      const Tensors outputs = engine_ ? layers_[0]({x}) : body_({x});
      loss = through_scopes(outputs[1] * seed).sum();
    }
    loss.backward();
    std::vector<at::Tensor> results{weight_.grad().clone()};
    streams_.order(streams_.b(), streams_.a());
    return results;
  }

 private:
  StreamPair streams_;
  at::Tensor weight_;
  TensorFunction body_;
  torch::nn::Module model_;
};

}  // namespace

std::vector<NamedProgram> call_stream_programs() {
  return {named_program<CallsOnTwoStreams>("calls_on_two_streams"),
          named_program<CallsOfALoadersBatch>("calls_of_a_loaders_batch"),
          named_program<WeightsFromAnotherStream>("weights_from_another_stream"),
          named_program<OnlyAddsIntoGrad>("only_adds_into_grad")};
}

}  // namespace sidestream::testing_model
