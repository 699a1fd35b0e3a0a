// Programs that say themselves when their eager groups are offloaded and reloaded.
#include <deque>
#include <utility>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/autograd.h>

#include "sidestream/scope.h"
#include "unit/graphs/engine_program.h"

namespace sidestream::testing_model {
namespace {

/// Four microbatches, two in flight. Each group leaves behind the next one's work, and its memory is used again at once.
class GroupsThatAreAsked final : public EngineProgram {
 public:
  explicit GroupsThatAreAsked(const Runtimes& runtimes) : EngineProgram(runtimes) {
    make_engine(model_, Options(device()).min_bytes(1024).offload("**"));
  }
  ~GroupsThatAreAsked() override { end(); }

  std::vector<at::Tensor> step(std::int64_t s) override {
    const auto step = step_of_engine();
    std::vector<at::Tensor> grads;
    std::deque<Microbatch> in_flight;
    for (std::int64_t m = 0; m < 4; ++m) {
      in_flight.emplace_back().forward(rows_of(4 * s + m).requires_grad_(true));
      if (in_flight.size() == 2) {
        grads.push_back(in_flight.front().backward());
        in_flight.pop_front();
      }
    }
    grads.push_back(in_flight.front().backward());
    return grads;
  }

 private:
  struct Microbatch {
    at::Tensor input, loss;
    std::deque<OffloadScope> groups;

    void forward(at::Tensor x) {
      input = std::move(x);
      at::Tensor h = input.mul(1.5);
      offload_delayed();
      for (const char* name : {"first", "second", "third", "fourth"}) {
        OffloadScope& group = groups.emplace_back(name);
        const at::Tensor early = h.exp();  // is saved already
        mark_ready(early);
        const at::Tensor shifted = early.mul(0.5);
        mark_ready(shifted);
        h = shifted.sin().tanh();
        group.end_later();
        const std::size_t ended = groups.size();
        if (ended > 1) {
          groups[ended - 2].start_offload();
        }
        if (ended > 2) {
          groups[ended - 3].finish_offload();
        }
        h = h.mul(0.9).add(0.1);  // on memory that was freed
      }
      loss = h.sum();
    }
    at::Tensor backward() {
      for (auto group = groups.rbegin(); group != groups.rend(); ++group) {
        group->start_reload();
      }
      const at::Tensor gradient = torch::autograd::grad({loss}, {input})[0];
      loss.reset();
      return gradient.mul(1.1);
    }
  };

  torch::nn::Module model_;
};

/// The program holds what its groups save, and releases it.
class ReleasedTensors final : public EngineProgram {
 public:
  explicit ReleasedTensors(const Runtimes& runtimes) : EngineProgram(runtimes) {
    make_engine(model_, Options(device()).min_bytes(1024).offload("**"));
  }
  ~ReleasedTensors() override { end(); }

  std::vector<at::Tensor> step(std::int64_t s) override {
    const auto step = step_of_engine();
    const at::Tensor x = rows_of(s).requires_grad_(true);
    at::Tensor h = x.mul(1.5);
    std::vector<at::Tensor> held;
    for (const char* name : {"first", "second", "third", "fourth"}) {
      OffloadScope group(name);
      held.push_back(h.exp());
      h = held.back().mul(0.5).tanh();
      group.end();
      group.release(held.back());
      group.finish_offload();
      h = h.mul(0.9).add(0.1);  // on memory that was freed
    }
    return torch::autograd::grad({h.sum()}, {x});
  }

 private:
  torch::nn::Module model_;
};

/// A tensor is marked that lies in memory of a graph. The next replay puts its bytes elsewhere before its group ends.
class ReadyAndCopiedOut final : public EngineProgram {
 public:
  explicit ReadyAndCopiedOut(const Runtimes& runtimes) : EngineProgram(runtimes) {
    if (make_engine(model_, Options(device()).min_bytes(1024).offload("**"))) {
      layers_ = make_graphed_callables(*engine_, {Callable("teacher", teach)}, {{rows_of(900)}},
                                       GraphOptions().forward_only(true).pool(std::make_shared<GraphPool>(device())));
    }
  }
  ~ReadyAndCopiedOut() override { end(); }

  std::vector<at::Tensor> step(std::int64_t s) override {
    const auto step = step_of_engine();
    const at::Tensor x = rows_of(s).requires_grad_(true);
    OffloadScope scope("student");
    at::Tensor target = taught(rows_of(s + 10));
    const at::Tensor first = x * target;
    mark_ready(target);
    target.reset();
    at::Tensor h = first + taught(rows_of(s + 20));
    scope.end();
    for (const char* name : {"first", "second", "third"}) {
      const OffloadScope later(name);
      h = h.exp().mul(0.5).tanh();
    }
    return torch::autograd::grad({h.sum()}, {x});
  }

 private:
  static std::vector<at::Tensor> teach(const std::vector<at::Tensor>& inputs) { return {(inputs[0] * 1.25).tanh()}; }
  at::Tensor taught(const at::Tensor& input) {
    const at::NoGradGuard no_grad;
    return layers_.empty() ? teach({input})[0] : layers_[0]({input})[0];
  }

  torch::nn::Module model_;
};

}  // namespace

std::vector<NamedProgram> asked_programs() {
  return {named_program<GroupsThatAreAsked>("groups_that_are_asked"),
          named_program<ReleasedTensors>("released_tensors"), named_program<ReadyAndCopiedOut>("ready_and_copied_out")};
}

}  // namespace sidestream::testing_model
