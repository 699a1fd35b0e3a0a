// What a replay costs the host, by direction and by what becomes of gradients, against the bare calls that it makes: layers so small
// that the device is never what limits.
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
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
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "graphs/engine/engine_access.h"
#include "runtime/forwarding_runtime.h"
#include "sidestream/sidestream.h"
#include "tools/bench/step_time.h"

namespace sidestream {
namespace {

constexpr std::int64_t kElements = 8;

/// Two products, and parameters as many as a transformer block has: more kernels, and the device would be what is measured.
class TinyBlock : public torch::nn::Module {
 public:
  explicit TinyBlock(std::int64_t parameters) {
    for (std::int64_t i = 0; i < parameters; ++i) {
      weights_.push_back(register_parameter("weight" + std::to_string(i), at::ones({kElements})));
    }
  }
  /// `others`: inputs that cost a copy and no kernel. With `all` each weight gets a gradient.
  at::Tensor forward(const at::Tensor& h, const std::vector<at::Tensor>& /*others*/, bool all) {
    if (!all) {
      return h * weights_.front() * weights_.back();
    }
    at::Tensor result = h;
    for (const at::Tensor& weight : weights_) {
      result = result * weight;
    }
    return result;
  }

 private:
  std::vector<at::Tensor> weights_;
};

class TinyLayers : public torch::nn::Module {
 public:
  TinyLayers(std::int64_t layers, std::int64_t parameters) {
    for (std::int64_t i = 0; i < layers; ++i) {
      blocks_->push_back(std::make_shared<TinyBlock>(parameters));
    }
    register_module("blocks", blocks_);
  }
  at::Tensor forward(at::Tensor h, const std::vector<at::Tensor>& others, bool all) {
    for (const auto& block : *blocks_) {
      h = call(block->as<TinyBlock>(), h, others, all);
    }
    return h;
  }

 private:
  torch::nn::ModuleList blocks_;
};

/// Notes the launches, records, waits and copies that an engine queues, so that the same may be queued without it.
class NotingRuntime final : public ForwardingRuntime {
 public:
  using ForwardingRuntime::ForwardingRuntime;
  using ForwardingRuntime::record;
  using ForwardingRuntime::wait;

  void note(bool on) { on_ = on; }
  /// What was noted since the last call.
  [[nodiscard]] auto take() { return std::exchange(calls_, {}); }

  void record(const Event& event, c10::Stream stream) override { noted(Record<Event>{&event, stream}); }
  void wait(c10::Stream stream, const Event& event) override { noted(Wait<Event>{&event, stream}); }
  void record(const ExternalEvent& event, c10::Stream stream) override { noted(Record<ExternalEvent>{&event, stream}); }
  void wait(c10::Stream stream, const ExternalEvent& event) override { noted(Wait<ExternalEvent>{&event, stream}); }
  void launch(const Graph& graph, c10::Stream stream) override { noted(Launch{&graph, stream}); }

 private:
  template <class AnyEvent>
  struct Record {
    const AnyEvent* event;
    c10::Stream stream;
    void run(Runtime& runtime) const { runtime.record(*event, stream); }
  };
  template <class AnyEvent>
  struct Wait {
    const AnyEvent* event;
    c10::Stream stream;
    void run(Runtime& runtime) const { runtime.wait(stream, *event); }
  };
  struct Launch {
    const Graph* graph;
    c10::Stream stream;
    void run(Runtime& runtime) const { runtime.launch(*graph, stream); }
  };

 public:
  using Call = std::variant<Record<Event>, Wait<Event>, Record<ExternalEvent>, Wait<ExternalEvent>, Launch>;
  using Calls = std::vector<Call>;

 private:
  template <class Any>
  void noted(const Any& call) {
    if (on_) {
      calls_.emplace_back(call);
    }
    call.run(inner());
  }

  bool on_ = false;
  Calls calls_;
};

struct Setting {
  std::string device;
  GradientPolicy policy = GradientPolicy::accumulated;
  std::int64_t layers = 12;
  std::int64_t parameters = 12;
  std::int64_t inputs = 1;
  bool all = false;
  std::int64_t steps = 500;
};

/// Of one replay, in microseconds: medians over blocks of steps.
struct Cost {
  double forward = 0;
  double backward = 0;
};

std::string_view name_of(GradientPolicy policy) {
  switch (policy) {
    case GradientPolicy::cloned:
      return "cloned";
    case GradientPolicy::owned:
      return "owned";
    case GradientPolicy::accumulated:
      return "accumulated";
  }
  return "";
}

/// Runs `forward` and `backward` in turn and takes their times: what else the machine does falls into few blocks.
template <class Forward, class Backward>
Cost measure(std::int64_t steps, std::int64_t layers, const Forward& forward, const Backward& backward) {
  constexpr std::int64_t kBlock = 10;
  std::vector<double> forwards;
  std::vector<double> backwards;
  for (std::int64_t done = 0; done < steps; done += kBlock) {
    double in_forward = 0;
    double in_backward = 0;
    for (std::int64_t i = 0; i < kBlock; ++i) {
      const double begin = bench::cpu_seconds();
      forward();
      const double between = bench::cpu_seconds();
      backward();
      in_forward += between - begin;
      in_backward += bench::cpu_seconds() - between;
    }
    forwards.push_back(in_forward);
    backwards.push_back(in_backward);
  }
  const double scale = 1e6 / static_cast<double>(kBlock * layers);
  return {scale * bench::median(forwards), scale * bench::median(backwards)};
}

/// One model, its replays and the bare calls.
class Replays {
 public:
  explicit Replays(const Setting& setting)
      : setting_(setting),
        device_(find_device(setting.device)),
        model_(setting.layers, setting.parameters),
        runtime_(std::make_shared<NotingRuntime>(make_runtime(device_))),
        engine_(make_engine()),
        x_(at::ones({kElements}).to(device_).requires_grad_(true)),
        gradient_(at::ones({kElements}).to(device_)),
        others_(static_cast<std::size_t>(setting.inputs - 1), at::ones({kElements}).to(device_)) {
    constexpr int kWarmUp = 5;
    for (int i = 0; i < kWarmUp; ++i) {
      forward();
      backward();
    }
  }

  Cost of_replays() {
    return measure(
        setting_.steps, setting_.layers, [&] { forward(); }, [&] { backward(); });
  }

  /// The same launches, records and waits, with the copies of inputs, and with the clones of gradients where there are any.
  Cost of_bare_calls() {
    runtime_->note(true);
    forward();
    const NotingRuntime::Calls forwards = runtime_->take();
    backward();
    const NotingRuntime::Calls backwards = runtime_->take();
    runtime_->note(false);
    const at::NoGradGuard no_grad;
    at::Tensor target = at::zeros_like(gradient_);
    const std::int64_t copies = setting_.layers * (setting_.inputs - 1);
    const std::int64_t gradients = setting_.all ? setting_.parameters : std::min<std::int64_t>(setting_.parameters, 2);
    const std::int64_t clones = setting_.policy == GradientPolicy::cloned ? setting_.layers * gradients : 0;
    const std::shared_ptr<Runtime> bare = make_runtime(device_);
    const auto queue = [&](const NotingRuntime::Calls& calls) {
      for (const NotingRuntime::Call& call : calls) {
        std::visit([&](const auto& one) { one.run(*bare); }, call);
      }
    };
    const Cost cost = measure(
        setting_.steps, setting_.layers,
        [&] {
          for (std::int64_t i = 0; i < copies; ++i) {
            target.copy_(gradient_, /*non_blocking=*/true);
          }
          queue(forwards);
        },
        [&] {
          queue(backwards);
          for (std::int64_t i = 0; i < clones; ++i) {
            (void)gradient_.clone();
          }
        });
    synchronize(device_);
    return cost;
  }

 private:
  OffloadEngine make_engine() {
    model_.to(device_);
    return EngineAccess::engine(
        model_, Options(device_).graph("blocks.*").graph_options(GraphOptions().gradients("**", setting_.policy)),
        runtime_);
  }
  void forward() {
    for (at::Tensor& parameter : model_.parameters()) {
      if (setting_.policy != GradientPolicy::accumulated) {
        parameter.mutable_grad() = at::Tensor();
      }
    }
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
  std::shared_ptr<NotingRuntime> runtime_;
  OffloadEngine engine_;
  at::Tensor x_;
  at::Tensor gradient_;
  std::vector<at::Tensor> others_;
  std::optional<Step> step_;
  at::Tensor y_;
};

nlohmann::json run(const Setting& setting) {
  Replays replays(setting);
  const Cost with = replays.of_replays();
  const Cost bare = replays.of_bare_calls();
  std::fputs(
      fmt::format("{}, {} layers, {} inputs, {} parameters, {}: forward {:.2f} us (bare {:.2f}), backward {:.2f} us "
                  "(bare {:.2f})\n",
                  setting.device, setting.layers, setting.inputs, setting.parameters, name_of(setting.policy),
                  with.forward, bare.forward, with.backward, bare.backward)
          .c_str(),
      stderr);
  return {{"device", describe(find_device(setting.device)).name},
          {"layers", setting.layers},
          {"inputs", setting.inputs},
          {"parameters", setting.parameters},
          {"gradients", name_of(setting.policy)},
          {"forward_us", with.forward},
          {"forward_bare_us", bare.forward},
          {"backward_us", with.backward},
          {"backward_bare_us", bare.backward}};
}

}  // namespace
}  // namespace sidestream

int main(int argc, char** argv) {
  using sidestream::GradientPolicy;
  CLI::App app("CPU time of a replay, autograd's node included, against the bare launches, records, waits and copies");
  sidestream::Setting setting;
  setting.device = "auto";
  std::vector<std::int64_t> layers{12};
  std::vector<std::int64_t> parameters{1, 100};
  std::vector<std::int64_t> inputs{1, 100};
  app.add_option("--device", setting.device, "auto, cuda or sim")->capture_default_str();
  app.add_option("--layers", layers, "each in turn")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--parameters", parameters, "of a layer, each in turn")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--inputs", inputs, "of a layer, each in turn")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_flag("--all", setting.all, "each parameter gets a gradient; else the first and the last");
  app.add_option("--steps", setting.steps)->check(CLI::PositiveNumber)->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
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
            all.push_back(sidestream::run(setting));
          }
        }
      }
    }
    std::fputs((all.dump(2) + "\n").c_str(), stdout);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_replay: %s\n", error.what());
    return 1;
  }
  return 0;
}
