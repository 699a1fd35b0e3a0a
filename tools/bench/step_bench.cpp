#include "tools/bench/step_bench.h"

#include <algorithm>
#include <utility>

#include <ATen/Context.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>

#include "graphs/engine/engine_access.h"
#include "tools/bench/scaled_layers.h"

namespace sidestream::bench {
namespace {

constexpr int kWarmSteps = 5;  // sizing, capture, and replays
constexpr std::size_t kWatched = 5;
constexpr double kLearningRate = 1e-5;

/// Of steps in blocks of `block`, one right after the other.
StepTime of_one_round(c10::Device device, std::int64_t block, const std::function<void()>& run) {
  run();
  const auto run_block = [&] {
    for (std::int64_t i = 0; i < block; ++i) {
      run();
    }
  };
  std::vector<StepTime> watched(kWatched);
  std::generate(watched.begin(), watched.end(), [&] { return time_of(device, run_block, block); });
  return median(watched);
}

}  // namespace

const std::vector<StepMode>& step_modes() {
  static const std::vector<StepMode> modes{{"eager", StepMode::Graphs::none, false},
                                           {"layer graphs", StepMode::Graphs::layers, false},
                                           {"layer graphs+offload", StepMode::Graphs::layers, true},
                                           {"whole step", StepMode::Graphs::step, false},
                                           {"whole step+offload", StepMode::Graphs::step, true}};
  return modes;
}

TrainedInMode::TrainedInMode(const StepSettings& settings, c10::Device device, StepMode mode) : mode_(std::move(mode)) {
  at::manual_seed(1);
  if (settings.model == "tiny") {
    auto tiny = std::make_shared<ScaledLayers>(settings.shape.layers);
    model_ = tiny;
    loss_ = [tiny](const Tensors& inputs) -> Tensors { return {(tiny->forward(inputs[0]) * inputs[1]).sum()}; };
    inputs_ = {at::ones({Scaled::kElements}).to(device), at::ones({Scaled::kElements}).to(device)};
    model_->to(device);
  } else {
    constexpr std::int64_t kValues = 256;
    const auto bytes = byte_model::ByteModel(settings.shape).ptr();
    model_ = bytes;
    loss_ = [bytes](const Tensors& inputs) -> Tensors { return {bytes->loss(inputs[0])}; };
    inputs_ = {at::randint(kValues, {settings.batch, settings.shape.seq + 1}, at::kLong).to(device)};
    model_->to(device, settings.dtype == "bfloat16" ? at::kBFloat16 : at::kFloat);
  }
  optimizer_.emplace(model_->parameters(), kLearningRate);
  if (mode_.graphs == StepMode::Graphs::none) {
    return;
  }
  Options options(device);
  options.min_bytes(static_cast<std::size_t>(settings.min_kib) << 10);
  if (mode_.offload) {
    options.offload(settings.offload);
  }
  if (mode_.graphs == StepMode::Graphs::layers) {
    options.graph("blocks.*").graph_options(GraphOptions().gradients("**", GradientPolicy::accumulated));
  }
  engine_.emplace(*model_, options);
  if (mode_.graphs == StepMode::Graphs::step) {
    const auto loss = [given = loss_](torch::nn::Module&, const Tensors& inputs) { return given(inputs); };
    whole_ = make_graphed_step(*engine_, Callable("step", owning(loss), model_), {inputs_},
                               StepOptions().update([this] { optimizer_->step(); }));
  }
}

void TrainedInMode::step() {
  if (whole_) {
    (void)(*whole_)({inputs_});
    return;
  }
  std::optional<Step> active;
  if (engine_) {
    active.emplace(engine_->step());
  }
  loss_(inputs_)[0].backward();
  optimizer_->step();
  if (active) {
    active->finish();
  }
  optimizer_->zero_grad();
}

void TrainedInMode::launch(c10::Stream stream) {
  EngineState& state = EngineAccess::state(*engine_);
  state.sequences().for_each([&](const GraphSequence& sequence) {
    state.runtime().launch(sequence.captured().calls.front().forward.graph, stream);
  });
}

std::int64_t TrainedInMode::offloaded_bytes() const {
  if (whole_) {
    return static_cast<std::int64_t>(whole_->offloaded_bytes());
  }
  return engine_ ? engine_->report().offloaded_bytes : 0;
}

std::vector<ModeTimes> time_modes(const StepSettings& settings) {
  const c10::Device device = find_device(settings.device);
  std::vector<std::unique_ptr<TrainedInMode>> models;
  std::vector<ModeTimes> times;
  for (const StepMode& mode : step_modes()) {
    if (std::find(settings.modes.begin(), settings.modes.end(), mode.name) == settings.modes.end()) {
      continue;
    }
    models.push_back(std::make_unique<TrainedInMode>(settings, device, mode));
    times.emplace_back().name = mode.name;
    for (int i = 0; i < kWarmSteps; ++i) {
      models.back()->step();
    }
  }
  synchronize(device);
  const std::shared_ptr<Runtime> runtime = make_runtime(device);
  const OwnedStream stream = runtime->create_stream();
  const std::int64_t block = settings.steps_in_a_block();
  in_turns(models.size(), settings.rounds, [&](std::size_t i) {
    times[i].steps.push_back(of_one_round(device, block, [&] { models[i]->step(); }));
    if (models[i]->mode().graphs == StepMode::Graphs::step) {
      times[i].launches.push_back(of_one_round(device, block, [&] { models[i]->launch(stream); }));
    }
  });
  for (std::size_t i = 0; i < models.size(); ++i) {
    times[i].offloaded_bytes = models[i]->offloaded_bytes();
    times[i].captures = models[i]->captures();
  }
  return times;
}

}  // namespace sidestream::bench
