// Programs that keep outputs of graphed calls, or read them on streams beside the one they were given out on.
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>

#include "graphs/engine/engine_access.h"
#include "models/layer_stack.h"
#include "sidestream/engine.h"
#include "unit/graphs/ordered_programs.h"

namespace sidestream::testing_model {
namespace {

/// A stack whose outputs are ordinary tensors. What plain training needs of order between the streams, the programs have.
class OutputProgram : public Program {
 public:
  /// `linked`: each layer takes the output of the one before, so that its memory is used again in the same pass.
  explicit OutputProgram(const Runtimes& runtimes, bool linked = true, const GraphOptions& options = {})
      : runtime_(runtimes.model),
        a_(runtime_->create_stream()),
        b_(runtime_->create_stream()),
        meeting_(runtime_->create_event()),
        model_(layer_stack(kLayers, runtime_->device())) {
    if (runtimes.engine != nullptr) {
      engine_.emplace(EngineAccess::engine(*model_, Options(runtime_->device()).offload("layers.*.*").min_bytes(1024),
                                           runtimes.engine));
      layers_ = graph_stack(*engine_, model_, runtime_->device(), options, linked);
    }
    runtime_->synchronize_device();
  }
  ~OutputProgram() override { runtime_->synchronize_device(); }
  [[nodiscard]] const OffloadEngine* engine() const override { return engine_ ? &*engine_ : nullptr; }

 protected:
  [[nodiscard]] c10::Stream a() const { return a_.get(); }
  [[nodiscard]] c10::Stream b() const { return b_.get(); }
  void order(c10::Stream earlier, c10::Stream later) {
    runtime_->record(meeting_, earlier);
    runtime_->wait(later, meeting_);
  }
  [[nodiscard]] at::Tensor rows_of(std::int64_t s, std::int64_t salt = 0) const {
    return rows(s, runtime_->device(), salt);
  }
  /// Forward and backward on the current stream; `given` gets each layer's output as it comes.
  void pass(std::int64_t s, std::vector<at::Tensor>& gradients, const std::function<void(const at::Tensor&)>& given) {
    model_->zero_grad();
    const at::Tensor x = rows_of(s).requires_grad_(true);
    at::Tensor h = x;
    for (std::ptrdiff_t i = 0; i < kLayers; ++i) {
      h = engine_ ? layers_[static_cast<std::size_t>(i)]({h})[0] : (model_->begin() + i)->forward(h);
      given(h);
    }
    (h * rows_of(s, 1)).sum().backward();
    gradients.push_back(x.grad());
    for (const at::Tensor& parameter : model_->parameters()) {
      gradients.push_back(parameter.grad());
    }
  }
  /// Gives the outputs of all layers.
  std::vector<at::Tensor> pass(std::int64_t s, std::vector<at::Tensor>& gradients) {
    std::vector<at::Tensor> outputs;
    pass(s, gradients, [&](const at::Tensor& output) { outputs.push_back(output.detach()); });
    return outputs;
  }

  static constexpr std::int64_t kLayers = 4;

 private:
  std::shared_ptr<Runtime> runtime_;
  OwnedStream a_;
  OwnedStream b_;
  Event meeting_;
  torch::nn::Sequential model_;
  std::optional<OffloadEngine> engine_;
  std::vector<GraphedCallable> layers_;
};

/// All outputs are kept, as a list of hidden states is.
class HeldOutputs final : public OutputProgram {
 public:
  using OutputProgram::OutputProgram;
  std::vector<at::Tensor> step(std::int64_t s) override {
    std::vector<at::Tensor> results;
    for (at::Tensor& output : pass(s, results)) {
      results.push_back(std::move(output));
    }
    return results;
  }
};

/// Steps on two streams in turn that never meet; the one reads outputs when the other's step has begun.
template <bool held>
class StreamsInTurn final : public OutputProgram {
 public:
  using OutputProgram::OutputProgram;
  std::vector<at::Tensor> step(std::int64_t s) override {
    const c10::StreamGuard on_stream(s % 2 == 0 ? a() : b());
    std::vector<at::Tensor> results;
    const std::vector<at::Tensor> outputs = pass(s, results);
    for (const at::Tensor& output : outputs) {
      results.push_back(output.mul(2));
      if (held) {
        results.push_back(output);
      }
    }
    return results;
  }
};

/// Another stream reads the outputs, named by record_stream; nobody holds them.
class NamedStream final : public OutputProgram {
 public:
  using OutputProgram::OutputProgram;
  std::vector<at::Tensor> step(std::int64_t s) override {
    const c10::StreamGuard on_a(a());
    std::vector<at::Tensor> results;
    for (at::Tensor& output : pass(s, results)) {
      order(a(), b());
      const c10::StreamGuard on_b(b());
      output.record_stream(b());
      results.push_back(output.mul(2));
    }
    return results;
  }
};

/// The same while the step goes on: the next graphs may already use the memory of outputs that nobody holds. Each output is read behind
/// its own forward, or all of them behind the last.
template <bool behind_the_last>
class ReadBeside final : public OutputProgram {
 public:
  using OutputProgram::OutputProgram;
  std::vector<at::Tensor> step(std::int64_t s) override {
    const c10::StreamGuard on_a(a());
    std::vector<at::Tensor> results;
    std::vector<at::Tensor> outputs;
    pass(s, results, [&](const at::Tensor& given) {
      outputs.push_back(given.detach());
      if (behind_the_last && outputs.size() < kLayers) {
        return;
      }
      order(a(), b());
      const c10::StreamGuard on_b(b());
      for (const at::Tensor& output : std::exchange(outputs, {})) {
        output.record_stream(b());
        results.push_back(output.mul(2));
      }
    });
    return results;
  }
};

/// Another stream, named by record_stream, writes into outputs and reads them after the next step's forward; then they are let
/// go, and the first stream takes memory.
class NamedStreamWrites final : public OutputProgram {
 public:
  explicit NamedStreamWrites(const Runtimes& runtimes) : OutputProgram(runtimes, /*linked=*/false) {}
  std::vector<at::Tensor> step(std::int64_t s) override {
    const c10::StreamGuard on_a(a());
    std::vector<at::Tensor> results;
    std::vector<at::Tensor> outputs = pass(s, results);
    for (at::Tensor& kept : kept_) {
      const c10::StreamGuard on_b(b());
      results.push_back(kept.mul(3));
    }
    kept_.clear();
    results.push_back(at::full({2048}, 7.0, at::TensorOptions().device(outputs[0].device())));
    order(a(), b());
    for (at::Tensor& output : outputs) {
      const c10::StreamGuard on_b(b());
      output.record_stream(b());
      output.mul_(2);
    }
    kept_ = std::move(outputs);
    return results;
  }

 private:
  std::vector<at::Tensor> kept_;
};

/// Gradients of parameters in the graphs' own memory.
GraphOptions owned_by_graphs() { return GraphOptions().gradients("**", GradientPolicy::owned); }

/// They are kept, by steps on two streams in turn that never meet.
class OwnedGradientsInTurn final : public OutputProgram {
 public:
  explicit OwnedGradientsInTurn(const Runtimes& runtimes)
      : OutputProgram(runtimes, /*linked=*/true, owned_by_graphs()) {}
  std::vector<at::Tensor> step(std::int64_t s) override {
    const c10::StreamGuard on_stream(s % 2 == 0 ? a() : b());
    std::vector<at::Tensor> results;
    (void)pass(s, results);
    return results;
  }
};

/// Another stream reads them, named by record_stream; nobody holds them.
class OwnedGradientsNamedStream final : public OutputProgram {
 public:
  explicit OwnedGradientsNamedStream(const Runtimes& runtimes)
      : OutputProgram(runtimes, /*linked=*/true, owned_by_graphs()) {}
  std::vector<at::Tensor> step(std::int64_t s) override {
    const c10::StreamGuard on_a(a());
    std::vector<at::Tensor> results;
    std::vector<at::Tensor> given;
    (void)pass(s, given);
    order(a(), b());
    const c10::StreamGuard on_b(b());
    for (const at::Tensor& gradient : given) {
      gradient.record_stream(b());
      results.push_back(gradient.mul(2));
    }
    return results;
  }
};

/// Another stream reads the gradient of the input, named by record_stream; nobody holds it.
class InputGradientNamedStream final : public OutputProgram {
 public:
  using OutputProgram::OutputProgram;
  std::vector<at::Tensor> step(std::int64_t s) override {
    const c10::StreamGuard on_a(a());
    std::vector<at::Tensor> given;
    (void)pass(s, given);
    order(a(), b());
    const c10::StreamGuard on_b(b());
    given.front().record_stream(b());
    return {given.front().mul(2)};
  }
};

template <class Made>
NamedProgram named(std::string name) {
  return {std::move(name),
          [](const Runtimes& runtimes) -> std::unique_ptr<Program> { return std::make_unique<Made>(runtimes); }};
}

}  // namespace

std::vector<NamedProgram> output_programs() {
  return {named<HeldOutputs>("held_outputs"),
          named<StreamsInTurn<true>>("held_streams_in_turn"),
          named<StreamsInTurn<false>>("streams_in_turn"),
          named<NamedStream>("outputs_named_stream"),
          named<OwnedGradientsInTurn>("owned_gradients_in_turn"),
          named<OwnedGradientsNamedStream>("owned_gradients_named_stream"),
          named<InputGradientNamedStream>("input_gradient_named_stream"),
          named<ReadBeside<false>>("outputs_read_beside"),
          named<ReadBeside<true>>("outputs_read_behind_the_last"),
          named<NamedStreamWrites>("outputs_named_stream_writes")};
}

}  // namespace sidestream::testing_model
