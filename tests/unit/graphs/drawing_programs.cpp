// Programs whose graphs draw random numbers on streams that never meet.
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/autograd.h>

#include "graphs/engine/engine_access.h"
#include "models/layer_stack.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/scope.h"
#include "unit/graphs/ordered_programs.h"

namespace sidestream::testing_model {
namespace {

at::Tensor noisy(const at::Tensor& x) {
  const OffloadScope scope("noise");
  return at::dropout(x.mul(1.1).tanh(), 0.25, /*train=*/true).sigmoid();
}

/// Two sequences of layers with dropout, one on each of the trainer's streams, and nothing orders the streams.
class SequencesThatDraw final : public Program {
 public:
  explicit SequencesThatDraw(const Runtimes& runtimes)
      : runtime_(runtimes.model), streams_{runtime_->create_stream(), runtime_->create_stream()} {
    if (runtimes.engine != nullptr) {
      engine_.emplace(EngineAccess::engine(model_, Options(device()).min_bytes(1024).offload("**"), runtimes.engine));
      for (const std::string sequence : {"left", "right"}) {
        std::vector<Callable> callables;
        std::vector<std::vector<Sample>> samples;
        for (std::int64_t i = 0; i < kLayers; ++i) {
          callables.emplace_back(sequence + "." + std::to_string(i),
                                 [](const Tensors& x) { return Tensors{noisy(x[0])}; });
          samples.push_back({i > 0 ? Sample::output_of(i - 1) : Sample(rows(0, device()).requires_grad_(true))});
        }
        sequences_.push_back(
            make_graphed_callables(*engine_, std::move(callables), samples, GraphOptions().side_streams(1)));
      }
    }
    for (std::int64_t i = 0; i < 8; ++i) {
      inputs_.push_back(rows(i, device()).requires_grad_(true));
    }
    runtime_->synchronize_device();
  }
  ~SequencesThatDraw() override { runtime_->synchronize_device(); }
  [[nodiscard]] const OffloadEngine* engine() const override { return engine_ ? &*engine_ : nullptr; }

  std::vector<at::Tensor> step(std::int64_t s) override {
    at::Generator generator = at::globalContext().defaultGenerator(device());
    generator.set_current_seed(static_cast<std::uint64_t>(40 + s));
    std::vector<at::Tensor> grads;
    for (const std::size_t sequence : {0, 1}) {
      const c10::StreamGuard on_stream(streams_[sequence].get());
      const at::Tensor& x = inputs_[(2 * s + static_cast<std::int64_t>(sequence)) % 8];
      at::Tensor h = x;
      for (std::size_t i = 0; i < kLayers; ++i) {
        h = engine_ ? sequences_[sequence][i]({h})[0] : noisy(h);
      }
      grads.push_back(torch::autograd::grad({h.sum()}, {x})[0]);
    }
    return grads;
  }

 private:
  static constexpr std::int64_t kLayers = 3;
  [[nodiscard]] c10::Device device() const { return runtime_->device(); }

  std::shared_ptr<Runtime> runtime_;
  OwnedStream streams_[2];
  torch::nn::Module model_;
  std::optional<OffloadEngine> engine_;
  std::vector<std::vector<GraphedCallable>> sequences_;
  std::vector<at::Tensor> inputs_;
};

}  // namespace

std::vector<NamedProgram> drawing_programs() {
  return {{"sequences_that_draw", [](const Runtimes& runtimes) -> std::unique_ptr<Program> {
             return std::make_unique<SequencesThatDraw>(runtimes);
           }}};
}

}  // namespace sidestream::testing_model
