// Programs whose graphs draw random numbers on streams that never meet.
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/autograd.h>

#include "sidestream/scope.h"
#include "unit/graphs/engine_program.h"

namespace sidestream::testing_model {
namespace {

at::Tensor noisy(const at::Tensor& x) {
  const OffloadScope scope("noise");
  return at::dropout(x.mul(1.1).tanh(), 0.25, /*train=*/true).sigmoid();
}

/// Two sequences of layers with dropout, one on each of the trainer's streams, and nothing orders the streams.
class SequencesThatDraw final : public EngineProgram {
 public:
  explicit SequencesThatDraw(const Runtimes& runtimes) : EngineProgram(runtimes), streams_(runtime()) {
    if (make_engine(model_, Options(device()).min_bytes(1024).offload("**"))) {
      for (const std::string sequence : {"left", "right"}) {
        std::vector<Callable> callables;
        for (std::size_t i = 0; i < kLayers; ++i) {
          callables.emplace_back(sequence + "." + std::to_string(i),
                                 [](const Tensors& x) { return Tensors{noisy(x[0])}; });
        }
        capture_linked(callables, GraphOptions().side_streams(1));
      }
    }
    for (std::int64_t i = 0; i < 8; ++i) {
      inputs_.push_back(rows_of(i).requires_grad_(true));
    }
    runtime().synchronize_device();
  }
  ~SequencesThatDraw() override { end(); }

  std::vector<at::Tensor> step(std::int64_t s) override {
    at::Generator generator = at::globalContext().defaultGenerator(device());
    generator.set_current_seed(static_cast<std::uint64_t>(40 + s));
    std::vector<at::Tensor> grads;
    for (const std::size_t sequence : {0, 1}) {
      const c10::StreamGuard on_stream(streams_.by_turns(static_cast<std::int64_t>(sequence)));
      const at::Tensor& x = inputs_[(2 * s + static_cast<std::int64_t>(sequence)) % 8];
      at::Tensor h = x;
      for (std::size_t i = 0; i < kLayers; ++i) {
        h = engine_ ? layers_[sequence * kLayers + i]({h})[0] : noisy(h);
      }
      grads.push_back(torch::autograd::grad({h.sum()}, {x})[0]);
    }
    return grads;
  }

 private:
  static constexpr std::size_t kLayers = 3;

  StreamPair streams_;
  torch::nn::Module model_;
  std::vector<at::Tensor> inputs_;
};

}  // namespace

std::vector<NamedProgram> drawing_programs() { return {named_program<SequencesThatDraw>("sequences_that_draw")}; }

}  // namespace sidestream::testing_model
