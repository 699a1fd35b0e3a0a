#include "tools/bench/layer_bench.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <map>
#include <optional>
#include <utility>

#include <ATen/Context.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros_like.h>
#include <fmt/format.h>

namespace sidestream::bench {
namespace {

constexpr int kWarmSteps = 4;        // sizing, capture, two replays
constexpr int kBudgetWarmSteps = 8;  // and again after the plan
constexpr std::size_t kWatchedSteps = 3;
constexpr std::size_t kTimedSteps = 9;

}  // namespace

nlohmann::ordered_json report_header(const char* benchmark, const LayerSettings& settings) {
  const byte_model::ModelShape& shape = settings.shape;
  return {
      {"benchmark", benchmark},     {"version", version()},   {"device", describe(find_device(settings.device)).name},
      {"layers", shape.layers},     {"hidden", shape.hidden}, {"heads", shape.heads},
      {"kv_heads", shape.kv_heads}, {"ffn", shape.ffn},       {"dtype", settings.dtype}};
}

LayerBench::LayerBench(const LayerSettings& settings, std::vector<LayerMode> modes)
    : settings_(settings), device_(find_device(settings.device)), modes_(std::move(modes)) {
  if (settings.microbatches > 0) {
    order_ = pipeline_order(PipelineShape{settings.ranks, 1, settings.microbatches}, 0);
  }
  at::manual_seed(1);
  const at::ScalarType dtype = settings.dtype == "bfloat16" ? at::kBFloat16 : at::kFloat;
  layers_ = std::make_shared<BlockStack>(settings.shape);
  layers_->to(device_, dtype);
  for (at::Tensor& parameter : layers_->parameters()) {
    parameter.mutable_grad() = at::zeros_like(parameter);
  }
  const std::vector<std::int64_t> sizes{1, settings.shape.seq, settings.shape.hidden};
  input_ = at::randn(sizes).to(device_, dtype).requires_grad_();
  output_gradient_ = at::randn(sizes).mul_(1e-2).to(device_, dtype);
  synchronize(device_);
  release_cached_memory(device_);
  base_ = memory_use(device_);
}

std::unique_ptr<OffloadEngine> LayerBench::make_engine(const LayerMode& mode) const {
  if (!mode.graphs && !mode.offload) {
    return nullptr;
  }
  Options options(device_);
  options.min_bytes(static_cast<std::size_t>(settings_.min_kib) * 1024);
  if (mode.graphs) {
    options.graph("blocks.*")
        .graph_options(GraphOptions().side_streams(mode.side_streams).gradients("**", mode.gradients));
  }
  if (mode.window) {
    if (settings_.lookahead_mib) {
      options.lookahead(static_cast<std::size_t>(*settings_.lookahead_mib) << 20);
    }
    if (settings_.lag_mib) {
      options.lag(static_cast<std::size_t>(*settings_.lag_mib) << 20);
    }
  }
  if (settings_.host_gib) {
    options.host_cap(static_cast<std::size_t>(*settings_.host_gib) << 30);
  }
  options.device_budget(mode.budget);
  const std::int64_t first = mode.recomputed_layers;
  const std::int64_t last = mode.offloaded_layers.value_or(settings_.shape.layers) - 1;
  if (mode.offload && first <= last) {
    const std::string offloaded = fmt::format("blocks.{{{}..{}}}.", first, last);
    for (const std::string& group : mode.everything ? std::vector<std::string>{"*"} : settings_.groups) {
      options.offload(offloaded + group);
    }
  }
  if (mode.offload && first > 0) {
    options.offload("recomputed");
  }
  return std::make_unique<OffloadEngine>(*layers_, options);
}

void LayerBench::run_order(OffloadEngine* engine) const {
  struct InFlight {
    at::Tensor input;
    at::Tensor output;
  };
  std::map<std::int64_t, InFlight> in_flight;
  for (const PipelineStep& work : order_) {
    InFlight& microbatch = in_flight[work.microbatch];
    if (work.kind == PipelineStep::Kind::forward) {
      microbatch.input = input_.detach().clone().requires_grad_();  // as it would be received
      std::optional<Chunk> chunk;
      if (engine != nullptr) {
        chunk.emplace(engine->chunk({work.stage, work.microbatch}));
      }
      microbatch.output = layers_->forward(microbatch.input);
    } else {
      microbatch.output.backward(output_gradient_);
      in_flight.erase(work.microbatch);
    }
  }
}

StepTime LayerBench::step(OffloadEngine* engine, const LayerMode& mode) {
  if (settings_.unset_gradients) {
    layers_->zero_grad();
  }
  auto begin = std::chrono::steady_clock::now();
  double cpu_before = 0;
  const auto start = [&] {
    synchronize(device_);
    begin = std::chrono::steady_clock::now();
    cpu_before = cpu_seconds();
  };
  start();
  {
    std::optional<Step> step;
    if (engine != nullptr) {
      step.emplace(order_.empty() || !mode.told ? engine->step() : engine->step(order_));
    }
    if (order_.empty()) {
      const at::Tensor output = mode.forward ? mode.forward(*layers_, input_) : layers_->forward(input_);
      if (settings_.backward_only) {
        start();
      }
      output.backward(output_gradient_);
    } else {
      run_order(mode.told ? engine : nullptr);
    }
    if (engine != nullptr) {
      engine->backward_dw();
    }
    if (step) {
      step->finish();
    }
  }
  StepTime time{.issued = seconds_since(begin), .cpu = cpu_seconds() - cpu_before};
  synchronize(device_);
  time.wall = seconds_since(begin);
  input_.mutable_grad() = at::Tensor();
  return time;
}

nlohmann::ordered_json LayerBench::memory(const LayerMode& mode) {
  release_cached_memory(device_);  // of the mode before
  reset_memory_peaks(device_);
  return memory_of(make_engine(mode).get(), mode, kWarmSteps);
}

nlohmann::ordered_json LayerBench::within_budget(const LayerMode& mode) {
  release_cached_memory(device_);
  reset_memory_peaks(device_);
  const std::unique_ptr<OffloadEngine> engine = make_engine(mode);
  nlohmann::ordered_json json = memory_of(engine.get(), mode, kBudgetWarmSteps);
  std::vector<StepTime> watched(kTimedSteps);
  std::generate(watched.begin(), watched.end(), [&] { return step(engine.get(), mode); });
  const Report report = engine->report();
  json["device_budget"] = report.device_budget;
  json["forecast_peak_bytes"] = report.forecast_peak_bytes;
  json["step_peak_bytes"] = report.step_peak_bytes;
  json["first_step_peak_bytes"] = report.first_step_peak_bytes;
  json["forecast_ms"] = report.forecast_seconds * 1e3;
  json["measured_once_ms"] = report.forecast_step_seconds * 1e3;
  json["step_ms_median"] = median(watched).wall * 1e3;
  return json;
}

nlohmann::ordered_json LayerBench::memory_of(OffloadEngine* engine, const LayerMode& mode, int warm_steps) {
  auto warm_seconds = nlohmann::ordered_json::array();
  for (int i = 0; i < warm_steps; ++i) {
    warm_seconds.push_back(step(engine, mode).wall);
  }
  const MemoryUse warm = memory_use(device_);
  release_cached_memory(device_);
  reset_memory_peaks(device_);
  step(engine, mode);
  step(engine, mode);
  const MemoryUse use = memory_use(device_);
  nlohmann::ordered_json json{{"name", mode.name},
                              {"reserved_bytes", use.reserved_peak - base_.allocated},
                              {"live_peak_bytes", use.live_peak - base_.allocated},
                              {"first_steps_reserved_bytes", warm.reserved_peak - base_.allocated},
                              {"first_steps_live_peak_bytes", warm.live_peak - base_.allocated},
                              {"first_steps_seconds", warm_seconds}};
  const Report report = engine != nullptr ? engine->report() : Report{};
  json["offloaded_bytes"] = report.offloaded_bytes;
  json["pinned_requested_bytes"] = report.pinned_requested_bytes;
  json["in_flight_bytes"] = report.in_flight_bytes;
  json["pinned_bytes"] = report.pinned_bytes;
  json["waits"] = report.waits;
  json["captures"] = report.captures;
  json["notes"] = report.notes;
  json["traced_ms"] = report.traced_seconds * 1e3;
  json["waited_ms"] = report.waited_seconds * 1e3;
  json["offload_ms"] = report.offload_seconds * 1e3;
  json["reload_ms"] = report.reload_seconds * 1e3;
  json["tracing_ms"] = report.tracing_seconds * 1e3;
  if (engine != nullptr && !settings_.traces.empty()) {
    std::ofstream(settings_.traces + "/" + mode.name + ".json") << engine->trace_json();
  }
  return json;
}

std::vector<at::Tensor> LayerBench::gradients(const LayerMode& mode) {
  const std::unique_ptr<OffloadEngine> engine = make_engine(mode);
  std::vector<at::Tensor> gradients;
  for (int i = 0; i < kWarmSteps; ++i) {
    for (at::Tensor& parameter : layers_->parameters()) {
      parameter.mutable_grad().zero_();
    }
    step(engine.get(), mode);
  }
  for (const at::Tensor& parameter : layers_->parameters()) {
    gradients.push_back(parameter.grad().clone());
  }
  return gradients;
}

std::vector<std::vector<StepTime>> LayerBench::times() {
  std::vector<std::unique_ptr<OffloadEngine>> engines;
  for (const LayerMode& mode : modes_) {
    engines.push_back(make_engine(mode));
    for (int i = 0; i < kWarmSteps; ++i) {
      step(engines.back().get(), mode);
    }
  }
  std::vector<std::vector<StepTime>> all(modes_.size());
  in_turns(modes_.size(), settings_.rounds, [&](std::size_t i) {
    step(engines[i].get(), modes_[i]);
    std::vector<StepTime> watched(kWatchedSteps);
    std::generate(watched.begin(), watched.end(), [&] { return step(engines[i].get(), modes_[i]); });
    all[i].push_back(median(watched));
  });
  return all;
}

}  // namespace sidestream::bench
