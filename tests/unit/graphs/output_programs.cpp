// Programs that keep outputs of graphed calls, or read them on streams beside the one they were given out on.
#include <cstdint>
#include <functional>
#include <utility>

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>

#include "unit/graphs/engine_program.h"

namespace sidestream::testing_model {
namespace {

/// A stack whose outputs are ordinary tensors. What plain training needs of order between the streams, the programs have.
class OutputProgram : public StackProgram, protected StreamPair {
 public:
  /// `linked`: each layer takes the output of the one before, so that its memory is used again in the same pass.
  explicit OutputProgram(const Runtimes& runtimes, bool linked = true, const GraphOptions& options = {})
      : StackProgram(runtimes, kLayers), StreamPair(runtime()) {
    if (make_engine(*model_, stack_options())) {
      capture_linked(callables(0, kLayers), options, [linked](std::size_t /*layer*/) { return !linked; });
    }
    runtime().synchronize_device();
  }
  ~OutputProgram() override { end(); }

 protected:
  /// Forward and backward on the current stream; `given` gets each layer's output as it comes.
  void pass(std::int64_t s, std::vector<at::Tensor>& gradients, const std::function<void(const at::Tensor&)>& given) {
    model_->zero_grad();
    const at::Tensor x = rows_of(s).requires_grad_(true);
    at::Tensor h = x;
    for (std::size_t i = 0; i < kLayers; ++i) {
      h = run(i, i + 1, h);
      given(h);
    }
    (h * rows_of(s, 1)).sum().backward();
    gradients.push_back(x.grad());
    add_gradients(gradients);
  }
  /// Gives the outputs of all layers.
  std::vector<at::Tensor> pass(std::int64_t s, std::vector<at::Tensor>& gradients) {
    std::vector<at::Tensor> outputs;
    pass(s, gradients, [&](const at::Tensor& output) { outputs.push_back(output.detach()); });
    return outputs;
  }

  static constexpr std::size_t kLayers = 4;
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
    const c10::StreamGuard on_stream(by_turns(s));
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

/// Another stream reads what a step gave, named by record_stream; nobody holds it.
class NamedStream final : public OutputProgram {
 public:
  enum class Reads : std::uint8_t { outputs, gradients, input_gradient };
  NamedStream(const Runtimes& runtimes, Reads reads, const GraphOptions& options = {})
      : OutputProgram(runtimes, /*linked=*/true, options), reads_(reads) {}
  std::vector<at::Tensor> step(std::int64_t s) override {
    const c10::StreamGuard on_a(a());
    std::vector<at::Tensor> gradients;
    std::vector<at::Tensor> read = pass(s, gradients);
    std::vector<at::Tensor> results;
    (reads_ == Reads::outputs ? results : read) = std::move(gradients);
    if (reads_ == Reads::input_gradient) {
      read.resize(1);
    }
    order(a(), b());
    const c10::StreamGuard on_b(b());
    for (const at::Tensor& tensor : read) {
      tensor.record_stream(b());
      results.push_back(tensor.mul(2));
    }
    return results;
  }

 private:
  Reads reads_;
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

/// Steps on two streams in turn. The stream of the next step changes the outputs that are kept, and nobody names it to record_stream: a
/// reference and an event are enough.
class ChangedOnTheNextStream final : public OutputProgram {
 public:
  explicit ChangedOnTheNextStream(const Runtimes& runtimes) : OutputProgram(runtimes, /*linked=*/false) {}
  std::vector<at::Tensor> step(std::int64_t s) override {
    const c10::StreamGuard on_stream(by_turns(s));
    std::vector<at::Tensor> results;
    std::vector<at::Tensor> outputs = pass(s, results);
    results.insert(results.end(), kept_.begin(), kept_.end());
    order(by_turns(s), by_turns(s + 1));
    const c10::StreamGuard on_next(by_turns(s + 1));
    for (at::Tensor& output : outputs) {
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
    const c10::StreamGuard on_stream(by_turns(s));
    std::vector<at::Tensor> results;
    (void)pass(s, results);
    return results;
  }
};

}  // namespace

std::vector<NamedProgram> output_programs() {
  return {named_program<HeldOutputs>("held_outputs"),
          named_program<StreamsInTurn<true>>("held_streams_in_turn"),
          named_program<StreamsInTurn<false>>("streams_in_turn"),
          named_program<NamedStream>("outputs_named_stream", NamedStream::Reads::outputs),
          named_program<OwnedGradientsInTurn>("owned_gradients_in_turn"),
          named_program<NamedStream>("owned_gradients_named_stream", NamedStream::Reads::gradients, owned_by_graphs()),
          named_program<NamedStream>("input_gradient_named_stream", NamedStream::Reads::input_gradient),
          named_program<ReadBeside<false>>("outputs_read_beside"),
          named_program<ReadBeside<true>>("outputs_read_behind_the_last"),
          named_program<NamedStreamWrites>("outputs_named_stream_writes"),
          named_program<ChangedOnTheNextStream>("outputs_changed_on_next_stream")};
}

}  // namespace sidestream::testing_model
