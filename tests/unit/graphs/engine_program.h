#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>

#include "models/layer_stack.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"
#include "unit/graphs/ordered_programs.h"

namespace sidestream::testing_model {

/// A program that trains with an engine, or plainly without one.
class EngineProgram : public Program {
 public:
  explicit EngineProgram(Runtimes runtimes) : runtimes_(std::move(runtimes)) {}
  [[nodiscard]] const OffloadEngine* engine() const override { return engine_ ? &*engine_ : nullptr; }

 protected:
  /// Makes the engine. In plain training it makes none, and gives false.
  bool make_engine(torch::nn::Module& model, const Options& options);
  /// Captures `callables` as one sequence, behind those in `layers_`. Each takes the output of the one before, or a sample of its own if
  /// `own(i)` says so. The first always has its own.
  void capture_linked(const std::vector<Callable>& callables, const GraphOptions& options = {},
                      const std::function<bool(std::size_t i)>& own = {});
  /// Waits for the device, and destroys the graphs and the engine. For destructors: these use the program's model and streams.
  void end();

  [[nodiscard]] Runtime& runtime() const { return *runtimes_.model; }
  [[nodiscard]] c10::Device device() const { return runtime().device(); }
  [[nodiscard]] at::Tensor rows_of(std::int64_t s, std::int64_t salt = 0) const { return rows(s, device(), salt); }
  /// The engine's step, which ends when this object dies. Empty in plain training.
  [[nodiscard]] std::optional<Step> step_of_engine() {
    return engine_ ? std::optional<Step>(engine_->step()) : std::nullopt;
  }

  std::optional<OffloadEngine> engine_;
  std::vector<GraphedCallable> layers_;  ///< empty in plain training

 private:
  Runtimes runtimes_;
};

/// Two streams of the trainer's, and an event that orders them.
class StreamPair {
 public:
  explicit StreamPair(Runtime& runtime)
      : runtime_(runtime), a_(runtime.create_stream()), b_(runtime.create_stream()), meeting_(runtime.create_event()) {}
  [[nodiscard]] c10::Stream a() const { return a_.get(); }
  [[nodiscard]] c10::Stream b() const { return b_.get(); }
  [[nodiscard]] c10::Stream by_turns(std::int64_t i) const { return i % 2 == 0 ? a() : b(); }
  void order(c10::Stream earlier, c10::Stream later) {
    runtime_.record(meeting_, earlier);
    runtime_.wait(later, meeting_);
  }

 private:
  Runtime& runtime_;
  OwnedStream a_, b_;
  Event meeting_;
};

/// Layers that are graphed, or run as they are in plain training.
class StackProgram : public EngineProgram {
 public:
  StackProgram(const Runtimes& runtimes, std::size_t layers);
  ~StackProgram() override { end(); }

 protected:
  /// Of the engine.
  [[nodiscard]] Options stack_options() const { return Options(device()).offload("layers.*.*").min_bytes(1024); }
  /// Of layers [first, last).
  [[nodiscard]] std::vector<Callable> callables(std::size_t first, std::size_t last);
  [[nodiscard]] torch::nn::AnyModule& layer(std::size_t i) {
    return *(model_->begin() + static_cast<std::ptrdiff_t>(i));
  }
  /// Runs layers [first, last).
  at::Tensor run(std::size_t first, std::size_t last, at::Tensor h);
  /// Appends the gradients that there are.
  void add_gradients(std::vector<at::Tensor>& results) const;

  torch::nn::Sequential model_;
};

/// A program of the class `Made`.
template <class Made, class... Arguments>
NamedProgram named_program(std::string name, Arguments... arguments) {
  return {std::move(name), [arguments...](const Runtimes& runtimes) -> std::unique_ptr<Program> {
            return std::make_unique<Made>(runtimes, arguments...);
          }};
}

}  // namespace sidestream::testing_model
