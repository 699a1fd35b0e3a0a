// What a replay costs the host, by direction and by what becomes of gradients, against the bare calls that it makes and against what
// autograd takes for nodes that do nothing: layers of so few elements that the device is never what limits, of as few kernels as can
// be or of as many as a trainer's have.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <nlohmann/json.hpp>

#include "graphs/engine/engine_access.h"
#include "sidestream/sidestream.h"
#include "tools/bench/bare_nodes.h"
#include "tools/bench/bench_program.h"
#include "tools/bench/noting_runtime.h"
#include "tools/bench/step_time.h"

namespace sidestream {
namespace {

constexpr std::int64_t kElements = 8;

/// Products of few elements, each a kernel, and parameters as many as a transformer block has.
class TinyBlock : public torch::nn::Module {
 public:
  TinyBlock(std::int64_t parameters, std::int64_t products) : products_(static_cast<std::size_t>(products)) {
    for (std::int64_t i = 0; i < parameters; ++i) {
      weights_.push_back(register_parameter("weight" + std::to_string(i), at::ones({kElements})));
    }
  }
  /// `others`: inputs that cost a copy and no kernel. With `all` each weight gets a gradient, and there are as many products.
  at::Tensor forward(const at::Tensor& h, const std::vector<at::Tensor>& /*others*/, bool all) {
    at::Tensor result = h;
    const std::size_t products = all ? std::max(products_, weights_.size()) : products_;
    for (std::size_t i = 0; i < products; ++i) {
      const at::Tensor& first_or_last = i % 2 == 0 ? weights_.front() : weights_.back();
      result = result * (all ? weights_[i % weights_.size()] : first_or_last);
    }
    return result;
  }

 private:
  std::size_t products_;
  std::vector<at::Tensor> weights_;
};

class TinyLayers : public torch::nn::Module {
 public:
  TinyLayers(std::int64_t layers, std::int64_t parameters, std::int64_t products) {
    for (std::int64_t i = 0; i < layers; ++i) {
      blocks_->push_back(std::make_shared<TinyBlock>(parameters, products));
    }
    register_module("blocks", blocks_);
  }
  at::Tensor forward(at::Tensor h, const std::vector<at::Tensor>& others, bool all) {
    for (const auto& block : *blocks_) {
      h = call(block->as<TinyBlock>(), h, others, all);
    }
    return h;
  }
  [[nodiscard]] const torch::nn::ModuleList& layers() const { return blocks_; }

 private:
  torch::nn::ModuleList blocks_;
};

struct Setting {
  std::string device = "auto";
  GradientPolicy policy = GradientPolicy::accumulated;
  std::int64_t layers = 12;
  std::int64_t parameters = 12;
  std::int64_t inputs = 1;
  std::int64_t products = 2;
  bool all = false;
  std::int64_t steps = 500;

  /// Parameters of a layer that get one.
  [[nodiscard]] std::int64_t gradients() const {
    return all ? parameters : std::min({parameters, products, std::int64_t{2}});
  }
};

/// Of one replay, in microseconds: medians over blocks of steps.
struct Cost {
  double forward = 0;
  double backward = 0;
  // Of the thread that calls alone: autograd runs a GPU's backward on a thread of its own.
  double forward_on_thread = 0;
  double backward_on_thread = 0;
};

std::string_view name_of(GradientPolicy policy) {
  switch (policy) {
    case GradientPolicy::cloned:
      return "cloned";
    case GradientPolicy::owned:
      return "owned";
    case GradientPolicy::accumulated:
      return "accumulated";
    case GradientPolicy::delayed:
      return "delayed";
  }
  return "";
}

/// What was computed between construction and `taken`, in seconds.
class Stopwatch {
 public:
  struct Taken {
    double process = 0;
    double thread = 0;
  };
  [[nodiscard]] Taken taken() const { return {bench::cpu_seconds() - process_, bench::thread_cpu_seconds() - thread_}; }

 private:
  double process_ = bench::cpu_seconds();
  double thread_ = bench::thread_cpu_seconds();
};

/// Runs `prepare`, `forward` and `backward` in turn and takes the times of the last two: what else the machine does falls into few
/// blocks. Before each block the device is idle: its queue never fills.
template <class Prepare, class Forward, class Backward>
Cost measure(const Setting& setting, const c10::Device device, const Prepare& prepare, const Forward& forward,
             const Backward& backward) {
  constexpr std::int64_t kBlock = 10;
  std::vector<double> forwards, backwards, forwards_on_thread, backwards_on_thread;
  for (std::int64_t done = 0; done < setting.steps; done += kBlock) {
    Stopwatch::Taken in_forward, in_backward;
    const auto add = [](Stopwatch::Taken& sum, const Stopwatch::Taken& taken) {
      sum.process += taken.process;
      sum.thread += taken.thread;
    };
    synchronize(device);
    for (std::int64_t i = 0; i < kBlock; ++i) {
      prepare();
      const Stopwatch of_forward;
      forward();
      add(in_forward, of_forward.taken());
      const Stopwatch of_backward;
      backward();
      add(in_backward, of_backward.taken());
    }
    forwards.push_back(in_forward.process);
    backwards.push_back(in_backward.process);
    forwards_on_thread.push_back(in_forward.thread);
    backwards_on_thread.push_back(in_backward.thread);
  }
  synchronize(device);
  const double scale = 1e6 / static_cast<double>(kBlock * setting.layers);
  return {.forward = scale * bench::median(forwards),
          .backward = scale * bench::median(backwards),
          .forward_on_thread = scale * bench::median(forwards_on_thread),
          .backward_on_thread = scale * bench::median(backwards_on_thread)};
}

/// One model, its replays and the bare calls.
class Replays {
 public:
  explicit Replays(const Setting& setting)
      : setting_(setting),
        device_(find_device(setting.device)),
        model_(setting.layers, setting.parameters, setting.products),
        runtime_(std::make_shared<bench::NotingRuntime>(make_runtime(device_))),
        engine_(make_engine()),
        x_(at::ones({kElements}).to(device_).requires_grad_(true)),
        gradient_(at::ones({kElements}).to(device_)),
        parameters_(model_.parameters()) {
    for (std::int64_t i = 1; i < setting.inputs; ++i) {
      others_.push_back(at::ones({kElements}).to(device_));
    }
    constexpr int kWarmUp = 5;
    for (int i = 0; i < kWarmUp; ++i) {
      prepare();
      forward();
      backward();
    }
    note_calls();
  }

  Cost of_replays() {
    return measure(
        setting_, device_, [&] { prepare(); }, [&] { forward(); }, [&] { backward(); });
  }

  /// Nodes with the same edges that do nothing.
  Cost of_autograd() { return of_nodes({}); }

  /// The same launches, records and waits, with the copies of inputs, and with the clones of gradients where there are any.
  Cost of_bare_calls() {
    const at::NoGradGuard no_grad;
    return measure(
        setting_, device_, [] {},
        [&] {
          for (std::int64_t i = 0; i < setting_.layers; ++i) {
            copy_inputs();
          }
          for (const NotingRuntime::Calls& calls : forwards_) {
            queue(calls);
          }
        },
        [&] {
          for (const NotingRuntime::Calls& calls : backwards_) {
            queue(calls);
          }
          const bool clones = setting_.policy == GradientPolicy::cloned;
          for (std::int64_t i = 0; clones && i < setting_.layers * setting_.gradients(); ++i) {
            (void)gradient_.clone();
          }
        });
  }

  /// The bare calls of each layer, made by such a node: on autograd's thread, between its bookkeeping.
  Cost of_bare_calls_in_nodes() {
    return of_nodes([&](std::size_t layer, bool backward) {
      const at::NoGradGuard no_grad;
      if (!backward) {
        copy_inputs();
      }
      queue(backward ? backwards_[backwards_.size() - 1 - layer] : forwards_[layer]);
    });
  }

 private:
  using NotingRuntime = bench::NotingRuntime;

  Cost of_nodes(bench::BareNodes::Queue queue) {
    std::vector<std::vector<at::Tensor>> given;
    for (const auto& block : *model_.layers()) {
      std::vector<at::Tensor> parameters = block->parameters();
      if (setting_.policy == GradientPolicy::accumulated) {
        parameters.clear();
      } else if (setting_.gradients() == 1) {
        parameters = {parameters.front()};
      } else if (setting_.gradients() == 2) {
        parameters = {parameters.front(), parameters.back()};
      }
      given.push_back(std::move(parameters));
    }
    const bench::BareNodes nodes(std::move(given), setting_.policy == GradientPolicy::cloned, gradient_,
                                 std::move(queue));
    return measure(
        setting_, device_, [&] { prepare(); }, [&] { y_ = nodes.forward(x_); },
        [&] {
          y_.backward(gradient_);
          y_ = x_.mutable_grad() = at::Tensor();
        });
  }

  void copy_inputs() {
    for (std::int64_t i = 1; i < setting_.inputs; ++i) {
      target_.copy_(gradient_, /*non_blocking=*/true);
    }
  }
  void queue(const NotingRuntime::Calls& calls) {
    for (const NotingRuntime::Call& call : calls) {
      std::visit([&](const auto& one) { one.run(*bare_); }, call);
    }
  }
  /// Of a step that replays.
  void note_calls() {
    prepare();
    runtime_->note(true);
    forward();
    forwards_ = runtime_->take_by_launch();
    backward();
    backwards_ = runtime_->take_by_launch();
    runtime_->note(false);
  }

  OffloadEngine make_engine() {
    model_.to(device_);
    return EngineAccess::engine(
        model_, Options(device_).graph("blocks.*").graph_options(GraphOptions().gradients("**", setting_.policy)),
        runtime_);
  }
  void prepare() {
    for (at::Tensor& parameter : parameters_) {
      if (setting_.policy != GradientPolicy::accumulated) {
        parameter.mutable_grad() = at::Tensor();
      }
    }
  }
  void forward() {
    step_.emplace(engine_.step());
    y_ = model_.forward(x_, others_, setting_.all);
  }
  void backward() {
    y_.backward(gradient_);
    step_.reset();
    y_ = x_.mutable_grad() = at::Tensor();
  }

  Setting setting_;
  c10::Device device_;
  TinyLayers model_;
  std::shared_ptr<bench::NotingRuntime> runtime_;
  OffloadEngine engine_;
  at::Tensor x_;
  at::Tensor gradient_;
  std::vector<at::Tensor> parameters_;
  std::vector<at::Tensor> others_;
  at::Tensor target_ = at::zeros_like(gradient_);
  std::shared_ptr<Runtime> bare_ = make_runtime(device_);
  std::vector<NotingRuntime::Calls> forwards_;  ///< the bare calls of each launch, in their order
  std::vector<NotingRuntime::Calls> backwards_;
  std::optional<Step> step_;
  at::Tensor y_;
};

nlohmann::json json_of(const Cost& cost) {
  return {{"forward_us", cost.forward},
          {"backward_us", cost.backward},
          {"forward_thread_us", cost.forward_on_thread},
          {"backward_thread_us", cost.backward_on_thread}};
}

nlohmann::json run(const Setting& setting) {
  Replays replays(setting);
  const Cost with = replays.of_replays();
  const Cost autograd = replays.of_autograd();
  const Cost bare = replays.of_bare_calls();
  const Cost in_nodes = replays.of_bare_calls_in_nodes();
  std::fputs(
      fmt::format("{}, {} layers, {} inputs, {} parameters, {}: forward {:.2f} us (bare {:.2f}, autograd {:.2f}, "
                  "both {:.2f}), backward {:.2f} us (bare {:.2f}, autograd {:.2f}, both {:.2f})\n",
                  setting.device, setting.layers, setting.inputs, setting.parameters, name_of(setting.policy),
                  with.forward, bare.forward, autograd.forward, in_nodes.forward, with.backward, bare.backward,
                  autograd.backward, in_nodes.backward)
          .c_str(),
      stderr);
  return {{"device", describe(find_device(setting.device)).name},
          {"layers", setting.layers},
          {"inputs", setting.inputs},
          {"parameters", setting.parameters},
          {"products", setting.products},
          {"all", setting.all},
          {"gradients", name_of(setting.policy)},
          {"replay", json_of(with)},
          {"bare", json_of(bare)},
          {"autograd", json_of(autograd)},
          {"bare_in_nodes", json_of(in_nodes)}};
}

int run_all(int argc, char** argv) {
  CLI::App app(
      "Compares the CPU time of a replay, with its autograd node, to the bare launches, records, waits and copies");
  Setting setting;
  std::vector<std::int64_t> layers{12};
  std::vector<std::int64_t> parameters{1, 100};
  std::vector<std::int64_t> inputs{1, 100};
  app.add_option("--device", setting.device, "auto, cuda or sim")->capture_default_str();
  bench::add_positive(app, "--layers", layers, "Numbers of layers, measured one after the other");
  bench::add_positive(app, "--parameters", parameters, "Parameters of a layer, measured one after the other");
  bench::add_positive(app, "--inputs", inputs, "Inputs of a layer, measured one after the other");
  bench::add_positive(app, "--products", setting.products,
                      "Products of a layer, one kernel each; with --all at least as many as its parameters");
  app.add_flag("--all", setting.all, "Each parameter gets a gradient; without this only the first and the last");
  bench::add_positive(app, "--steps", setting.steps);
  CLI11_PARSE(app, argc, argv);
  nlohmann::json all = nlohmann::json::array();
  for (const std::int64_t count : layers) {
    for (const std::int64_t given : inputs) {
      for (const std::int64_t weights : parameters) {
        for (const GradientPolicy policy :
             {GradientPolicy::cloned, GradientPolicy::owned, GradientPolicy::accumulated}) {
          setting.layers = count;
          setting.inputs = given;
          setting.parameters = weights;
          setting.policy = policy;
          all.push_back(run(setting));
        }
      }
    }
  }
  std::fputs((all.dump(2) + "\n").c_str(), stdout);
  return 0;
}

}  // namespace
}  // namespace sidestream

int main(int argc, char** argv) {
  return sidestream::bench::run_benchmark("bench_replay", sidestream::run_all, argc, argv);
}
