// Programs whose graphed calls are made on several streams.
#include <array>
#include <utility>

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/autograd.h>

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

}  // namespace

std::vector<NamedProgram> call_stream_programs() {
  return {named_program<CallsOnTwoStreams>("calls_on_two_streams"),
          named_program<CallsOfALoadersBatch>("calls_of_a_loaders_batch")};
}

}  // namespace sidestream::testing_model
