// Programs of the reference systems' form, make_graphed_callables: whole passes, and those that leave layers out.
#include <functional>
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>

#include "graphs/sequence/sequence_streams.h"
#include "models/plain_twin.h"
#include "sidestream/graph_event.h"
#include "sidestream/replay_options.h"
#include "sidestream/scope.h"
#include "unit/graphs/engine_program.h"

namespace sidestream::testing_model {
namespace {

/// How a stack of layers is captured and run.
struct StackForm {
  std::string name;
  std::int64_t side_streams = 2;
  bool linked = true;
  std::size_t layers_run = 5;  ///< fewer: the rest of the sequence is left out, and its groups are reloaded inline
  bool stream = false;         ///< the caller's
  bool event = false;          ///< and the caller's
  bool accumulate = false;
  bool all_ahead = false;  ///< see Stack
};

/// A stack whose engine reloads one group at a time.
class Stack : public StackProgram {
 public:
  /// `all_ahead`: all that was offloaded is reloaded before the first backward.
  Stack(const Runtimes& runtimes, std::size_t layers, bool all_ahead)
      : StackProgram(runtimes, layers), stream_(runtime().create_stream()) {
    make_engine(*model_, stack_options().lookahead(all_ahead ? 1_GiB : 0));
  }
  ~Stack() override { end(); }

 protected:
  /// `own`: layers that take a sample of their own; the others take the output of the one before.
  void capture(const GraphOptions& options, const std::function<bool(std::size_t layer)>& own = {}) {
    if (engine_) {
      capture_linked(callables(0, model_->size()), options, own);
    }
  }
  /// Copies of those that there are: graphs may own them and add into them.
  void add_gradients(std::vector<at::Tensor>& results) const {
    std::vector<at::Tensor> gradients;
    StackProgram::add_gradients(gradients);
    for (const at::Tensor& gradient : gradients) {
      results.push_back(gradient.clone());
    }
  }
  void clear_gradients() { model_->zero_grad(); }
  [[nodiscard]] Tensors call(std::size_t layer, const at::Tensor& h, const ReplayOptions& options) {
    return engine_ ? layers_[layer]({h}, options) : Tensors{run(layer, layer + 1, h)};
  }
  /// One of the trainer's, for graphs to replay on.
  [[nodiscard]] c10::Stream stream() const { return stream_.get(); }

 private:
  OwnedStream stream_;
};

class Passes final : public Stack {
 public:
  Passes(const Runtimes& runtimes, const StackForm& form) : Stack(runtimes, 5, form.all_ahead), form_(form) {
    GraphOptions options =
        GraphOptions().gradients("**", form.accumulate ? GradientPolicy::accumulated : GradientPolicy::cloned);
    if (form.stream) {
      options.cuda_graph_stream(stream());
    } else {
      options.side_streams(form.side_streams);
    }
    if (form.event) {
      options.cuda_graph_event(std::make_shared<GraphEvent>(device()));
    }
    capture(options, [&](std::size_t /*layer*/) { return !form.linked; });
  }
  std::vector<at::Tensor> step(std::int64_t s) override {
    clear_gradients();
    const at::Tensor x = rows_of(s).requires_grad_(true);
    (run(0, form_.layers_run, x) * rows_of(s, 1)).sum().backward();
    std::vector<at::Tensor> results{x.grad()};
    add_gradients(results);
    return results;
  }

 private:
  StackForm form_;
};

/// Graphs on one stream add into the `.grad` into which autograd adds the gradients of an eager reader, on another.
class BesideAnEagerReader final : public Stack {
 public:
  explicit BesideAnEagerReader(const Runtimes& runtimes) : Stack(runtimes, kLayers, false), streams_(runtime()) {
    capture(GraphOptions().gradients("**", GradientPolicy::accumulated));
  }
  std::vector<at::Tensor> step(std::int64_t s) override {
    clear_gradients();
    const c10::StreamGuard on_a(streams_.a());
    const at::Tensor x = rows_of(s).requires_grad_(true);
    at::Tensor eager = s % 2 == 0 ? read_eagerly() : at::Tensor();  // the later one's backward runs first
    const at::Tensor graphed = run(0, kLayers, x).sum();
    eager = eager.defined() ? eager : read_eagerly();
    streams_.order(streams_.b(), streams_.a());
    at::globalContext().setWarnOnAccumulateGradStreamMismatch(false);  // plain training's warning of two streams
    (graphed + eager).backward();
    at::globalContext().setWarnOnAccumulateGradStreamMismatch(true);
    std::vector<at::Tensor> results{x.grad()};
    add_gradients(results);
    streams_.order(streams_.a(), streams_.b());
    return results;
  }

 private:
  static constexpr std::size_t kLayers = 3;
  [[nodiscard]] at::Tensor read_eagerly() {
    const c10::StreamGuard on_b(streams_.b());
    at::Tensor sum;
    for (const at::Tensor& parameter : model_->parameters()) {
      const at::Tensor of_one = parameter.square().sum();
      sum = sum.defined() ? sum + of_one : of_one;
    }
    return sum;
  }

  StreamPair streams_;
};

/// Each call is given its stream, the caller's current one by turns, and an event; a further stream reads an output that it waits for
/// by that event alone.
class GivenStream final : public Stack {
 public:
  explicit GivenStream(const Runtimes& runtimes)
      : Stack(runtimes, 3, /*all_ahead=*/false),
        reader_(runtime().create_stream()),
        meeting_(runtime().create_event()),
        event_(std::make_shared<GraphEvent>(device())) {
    capture(GraphOptions());
  }
  std::vector<at::Tensor> step(std::int64_t s) override {
    clear_gradients();
    const at::Tensor x = rows_of(s).requires_grad_(true);
    const c10::Stream current = runtime().current_stream();
    const at::Tensor first = call(0, x, ReplayOptions().stream(stream()).event(event_))[0];
    if (engine() != nullptr) {
      runtime().wait(reader_, GraphEventState::event_of(*event_));
    } else {
      runtime().record(meeting_, current);
      runtime().wait(reader_, meeting_);
    }
    at::Tensor read;
    {
      const c10::StreamGuard on_reader(reader_.get());
      read = first.detach().exp();
    }
    first.record_stream(reader_);
    const at::Tensor second = call(1, first, ReplayOptions().stream(s % 2 == 0 ? current : stream()))[0];
    (call(2, second, ReplayOptions())[0] * rows_of(s, 1)).sum().backward();
    runtime().record(meeting_, reader_);
    runtime().wait(current, meeting_);
    std::vector<at::Tensor> results{x.grad(), read};
    add_gradients(results);
    return results;
  }

 private:
  OwnedStream reader_;
  Event meeting_;
  std::shared_ptr<GraphEvent> event_;
};

/// A backward that stops at layer `stop` and leaves what it prefetched unused, then a pass that begins at layer `restart`.
struct Restart {
  std::int64_t side_streams;
  std::size_t stop;
  std::size_t restart;
  std::size_t end = 6;  ///< the second pass runs layers restart..end-1
  bool all_ahead = false;
};

class RestartedPasses final : public Stack {
 public:
  RestartedPasses(const Runtimes& runtimes, const Restart& restart)
      : Stack(runtimes, kLayers, restart.all_ahead), restart_(restart) {
    capture(GraphOptions().side_streams(restart.side_streams), [](std::size_t /*layer*/) { return true; });
  }
  std::vector<at::Tensor> step(std::int64_t s) override {
    clear_gradients();
    const at::Tensor x = rows_of(s).requires_grad_(true);
    const at::Tensor cut = run(0, restart_.stop, x).detach().clone().requires_grad_(true);
    (run(restart_.stop, kLayers, cut) * rows_of(s, 1)).sum().backward();
    const at::Tensor again = rows_of(s, 2).requires_grad_(true);
    (run(restart_.restart, restart_.end, again) * rows_of(s, 3)).sum().backward();
    std::vector<at::Tensor> results{cut.grad(), again.grad()};
    add_gradients(results);
    return results;
  }

 private:
  static constexpr std::size_t kLayers = 6;
  Restart restart_;
};

/// Layers 0..low-1 and cut..7 run, these maybe once more before the backward of those. The seed of layer low-1 is memory of the
/// pool that copies use as well.
struct Skip {
  std::int64_t side_streams;
  std::size_t low;
  std::size_t cut;
  bool all_ahead = false;
  bool again = false;
};

class SkipProgram : public Stack {
 public:
  SkipProgram(const Runtimes& runtimes, const Skip& skip) : Stack(runtimes, kLayers, skip.all_ahead), skip_(skip) {
    capture(GraphOptions().side_streams(skip.side_streams), [&](std::size_t layer) { return layer == skip.cut; });
  }

 protected:
  static constexpr std::size_t kLayers = 8;
  Skip skip_;
};

class SkippedLayers final : public SkipProgram {
 public:
  using SkipProgram::SkipProgram;
  std::vector<at::Tensor> step(std::int64_t s) override {
    clear_gradients();
    const at::Tensor x = rows_of(s).requires_grad_(true);
    const at::Tensor low = run(0, skip_.low, x);
    const at::Tensor cut = low.detach().clone().requires_grad_(true);
    (run(skip_.cut, kLayers, cut) * rows_of(s, 1)).sum().backward();
    if (skip_.again) {
      (run(skip_.cut, kLayers, cut) * rows_of(s, 2)).sum().backward();
    }
    (low * cut.grad()).sum().backward();
    std::vector<at::Tensor> results{x.grad(), cut.grad()};
    add_gradients(results);
    return results;
  }
};

/// All layers run. After the backward of layers cut..7, layers low..cut-1 run again on the output of layer low-1. By then the pool has
/// reused that output's memory, and reloads are under way.
class RepeatedLayers final : public SkipProgram {
 public:
  using SkipProgram::SkipProgram;
  std::vector<at::Tensor> step(std::int64_t s) override {
    clear_gradients();
    const at::Tensor x = rows_of(s).requires_grad_(true);
    const at::Tensor low = run(0, skip_.low, x);
    const at::Tensor cut = run(skip_.low, skip_.cut, low).detach().clone().requires_grad_(true);
    at::Tensor given_up = run(skip_.low, skip_.cut, low);
    (run(skip_.cut, kLayers, cut) * rows_of(s, 1)).sum().backward();
    given_up.reset();
    (run(skip_.low, skip_.cut, low) * cut.grad()).sum().backward();
    std::vector<at::Tensor> results{x.grad(), cut.grad()};
    add_gradients(results);
    return results;
  }
};

/// Callables that run a part of their forward on a stream of their own, joined after the scope has ended.
class ForkedCallables final : public EngineProgram {
 public:
  ForkedCallables(const Runtimes& runtimes, std::int64_t side_streams)
      : EngineProgram(runtimes), branch_(runtime().create_stream()), meeting_(runtime().create_event()) {
    if (make_engine(model_, Options(device()).min_bytes(1024).offload("**"))) {
      std::vector<Callable> callables;
      for (std::int64_t i = 0; i < kLayers; ++i) {
        callables.emplace_back("layers." + std::to_string(i),
                               owning([this](const Tensors& x) { return Tensors{forward(x[0])}; }));
      }
      capture_linked(callables, GraphOptions().side_streams(side_streams));
    }
  }
  ~ForkedCallables() override { end(); }

  std::vector<at::Tensor> step(std::int64_t s) override {
    const at::Tensor x = rows_of(s).requires_grad_(true);
    at::Tensor h = x;
    for (std::size_t i = 0; i < kLayers; ++i) {
      h = engine_ ? layers_[i]({h})[0] : forward(h);
    }
    (h * rows_of(s, 1)).sum().backward();
    return {x.grad()};
  }

 private:
  static constexpr std::int64_t kLayers = 4;

  void order(c10::Stream earlier, c10::Stream later) {
    runtime().record(meeting_, earlier);
    runtime().wait(later, meeting_);
  }
  at::Tensor forward(const at::Tensor& given) {
    const c10::Stream current = runtime().current_stream();
    const at::Tensor h = given.mul(1.1);
    at::Tensor branch;
    at::Tensor own;
    {
      const OffloadScope scope("experts");
      order(current, branch_);
      {
        const c10::StreamGuard on_branch(branch_.get());
        branch = h.exp().mul(0.1).tanh();
      }
      own = h.sigmoid();
    }
    const OffloadScope scope("rest");
    const at::Tensor rest = own.tanh();
    order(branch_, current);
    return rest + branch;
  }

  OwnedStream branch_;
  Event meeting_;
  torch::nn::Module model_;
};

}  // namespace

std::vector<NamedProgram> callable_programs() {
  std::vector<NamedProgram> result;
  for (const StackForm& form :
       {StackForm{"linked_1", 1}, StackForm{"linked_2", 2}, StackForm{"linked_3", 3}, StackForm{"unlinked_2", 2, false},
        StackForm{"part_1", 1, true, 3}, StackForm{"part_2", 2, true, 2}, StackForm{"unlinked_part_2", 2, false, 2},
        StackForm{"stream", 2, true, 5, true}, StackForm{"stream_event", 2, true, 5, true, true},
        StackForm{"accumulating_2", 2, true, 5, false, false, true},
        StackForm{.name = "ahead_1", .side_streams = 1, .all_ahead = true},
        StackForm{.name = "ahead_part_1", .side_streams = 1, .layers_run = 3, .all_ahead = true}}) {
    result.push_back(named_program<Passes>(form.name, form));
  }
  for (const Restart& restart :
       {Restart{1, 4, 1}, Restart{2, 4, 0}, Restart{2, 4, 1}, Restart{2, 3, 1}, Restart{2, 3, 2}, Restart{3, 3, 1},
        Restart{3, 2, 1}, Restart{3, 3, 2}, Restart{2, 4, 1, 4}, Restart{2, 4, 0, 4}, Restart{1, 4, 1, 6, true},
        Restart{1, 4, 0, 4, true}}) {
    result.push_back(
        named_program<RestartedPasses>("restart_K" + std::to_string(restart.side_streams) + "_stop" +
                                           std::to_string(restart.stop) + "_restart" + std::to_string(restart.restart) +
                                           "_end" + std::to_string(restart.end) + (restart.all_ahead ? "_ahead" : ""),
                                       restart));
  }
  for (const Skip& skip :
       {Skip{2, 2, 5}, Skip{2, 4, 6}, Skip{1, 5, 7}, Skip{1, 5, 7, true}, Skip{1, 5, 5, false, true}}) {
    result.push_back(named_program<SkippedLayers>("skip_K" + std::to_string(skip.side_streams) + "_low" +
                                                      std::to_string(skip.low) + "_cut" + std::to_string(skip.cut) +
                                                      (skip.all_ahead ? "_ahead" : "") + (skip.again ? "_again" : ""),
                                                  skip));
  }
  for (const Skip& skip : {Skip{1, 2, 6}, Skip{1, 4, 7}, Skip{1, 2, 5, true}, Skip{2, 1, 6, true}}) {
    result.push_back(named_program<RepeatedLayers>("repeat_K" + std::to_string(skip.side_streams) + "_low" +
                                                       std::to_string(skip.low) + "_cut" + std::to_string(skip.cut) +
                                                       (skip.all_ahead ? "_ahead" : ""),
                                                   skip));
  }
  result.push_back(named_program<BesideAnEagerReader>("beside_an_eager_reader"));
  result.push_back(named_program<GivenStream>("given_stream"));
  for (const std::int64_t side_streams : {1, 2}) {
    result.push_back(named_program<ForkedCallables>("forked_callables_" + std::to_string(side_streams), side_streams));
  }
  return result;
}

}  // namespace sidestream::testing_model
