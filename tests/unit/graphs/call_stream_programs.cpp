// Programs whose graphed calls are made on several streams.
#include <array>
#include <memory>
#include <optional>

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/autograd.h>

#include "graphs/engine/engine_access.h"
#include "models/layer_stack.h"
#include "sidestream/engine.h"
#include "unit/graphs/ordered_programs.h"

namespace sidestream::testing_model {
namespace {

/// Layers that were captured together and take nothing of each other are called on two streams in turn, and nothing orders the
/// streams.
class CallsOnTwoStreams final : public Program {
 public:
  explicit CallsOnTwoStreams(const Runtimes& runtimes)
      : runtime_(runtimes.model),
        streams_{runtime_->create_stream(), runtime_->create_stream()},
        model_(layer_stack(kLayers, runtime_->device())) {
    if (runtimes.engine != nullptr) {
      engine_.emplace(
          EngineAccess::engine(*model_, Options(device()).offload("layers.*.*").min_bytes(1024), runtimes.engine));
      layers_ = graph_stack(*engine_, model_, device(), GraphOptions().side_streams(2), /*linked=*/false);
    }
    for (std::int64_t i = 0; i < 4 * static_cast<std::int64_t>(kLayers); ++i) {
      inputs_.push_back(rows(i, device()).requires_grad_(true));
    }
    runtime_->synchronize_device();
  }
  ~CallsOnTwoStreams() override { runtime_->synchronize_device(); }
  [[nodiscard]] const OffloadEngine* engine() const override { return engine_ ? &*engine_ : nullptr; }

  std::vector<at::Tensor> step(std::int64_t s) override {
    std::array<at::Tensor, kLayers> losses;
    for (std::size_t i = 0; i < kLayers; ++i) {
      const c10::StreamGuard on_stream(streams_[i % 2].get());
      const at::Tensor& x = input(s, i);
      losses[i] = (engine_ ? layers_[i]({x})[0] : layer(i).forward(x)).sum();
    }
    std::vector<at::Tensor> gradients;
    for (std::size_t i = kLayers; i-- > 0;) {
      const c10::StreamGuard on_stream(streams_[i % 2].get());
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
  [[nodiscard]] c10::Device device() const { return runtime_->device(); }
  [[nodiscard]] torch::nn::AnyModule& layer(std::size_t i) {
    return *(model_->begin() + static_cast<std::ptrdiff_t>(i));
  }
  [[nodiscard]] const at::Tensor& input(std::int64_t s, std::size_t i) const {
    return inputs_[(kLayers * static_cast<std::size_t>(s) + i) % inputs_.size()];
  }

  std::shared_ptr<Runtime> runtime_;
  std::array<OwnedStream, 2> streams_;
  torch::nn::Sequential model_;
  std::optional<OffloadEngine> engine_;
  std::vector<GraphedCallable> layers_;
  std::vector<at::Tensor> inputs_;
};

}  // namespace

std::vector<NamedProgram> call_stream_programs() {
  return {{"calls_on_two_streams", [](const Runtimes& runtimes) -> std::unique_ptr<Program> {
             return std::make_unique<CallsOnTwoStreams>(runtimes);
           }}};
}

}  // namespace sidestream::testing_model
