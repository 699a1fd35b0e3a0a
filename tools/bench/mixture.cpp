// Step time of a mixture of experts: eager, its attention and routers in graphs, that with offload, and with the experts' copies
// delayed; and where a capacity fixes the experts' shapes, with whole layers in graphs. Modes take turns; each is compared with eager
// steps of the same model in the same round.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/randint.h>
#include <nlohmann/json.hpp>

#include "examples/mixture_model/mixture_model.h"
#include "sidestream/sidestream.h"
#include "tools/bench/bench_program.h"
#include "tools/bench/step_time.h"

namespace {

using namespace sidestream;
using Json = nlohmann::ordered_json;
using bench::StepTime;
using mixture_model::MixtureModel;
using mixture_model::MixtureShape;

constexpr int kWarmSteps = 4;  // sizing, capture, and two replays

struct Settings {
  std::string device = "auto";
  MixtureShape shape;
  std::int64_t batch = 4;
  double capacity = 1.25;
  std::string dtype = "float32";
  std::int64_t rounds = 15;
  std::int64_t min_kib = 4;
};

struct Mode {
  const char* name;
  const char* graphs;  ///< calls; null: eager
  bool offload;
  bool delay;
  bool fixed;  ///< shapes, by a capacity
};

constexpr const char* kFronts = "blocks.*.front";
constexpr const char* kLayers = "blocks.*";
// The first of each model is eager.
constexpr std::array<Mode, 8> kModes{{{"eager", nullptr, false, false, false},
                                      {"partial graphs", kFronts, false, false, false},
                                      {"partial graphs+offload", kFronts, true, false, false},
                                      {"partial graphs+offload delayed", kFronts, true, true, false},
                                      {"capacity: eager", nullptr, false, false, true},
                                      {"capacity: partial graphs", kFronts, false, false, true},
                                      {"capacity: layer graphs", kLayers, false, false, true},
                                      {"capacity: layer graphs+offload", kLayers, true, false, true}}};

class MixtureBench {
 public:
  explicit MixtureBench(const Settings& settings) : settings_(settings), device_(find_device(settings.device)) {
    model_ = make_model(0);
    fixed_model_ = make_model(settings.capacity);
    constexpr std::int64_t kValues = 256;
    windows_ = at::randint(kValues, {settings.batch, settings.shape.seq + 1}, at::kLong).to(device_);
  }

  [[nodiscard]] Json measure() {
    std::vector<std::unique_ptr<OffloadEngine>> engines;
    for (const Mode& mode : kModes) {
      engines.push_back(make_engine(mode));
      for (int i = 0; i < kWarmSteps; ++i) {
        (void)step(mode, engines.back().get());
      }
    }
    std::vector<std::vector<StepTime>> times(kModes.size());
    bench::in_turns(kModes.size(), settings_.rounds, [&](std::size_t i) {
      (void)step(kModes[i], engines[i].get());
      times[i].push_back(step(kModes[i], engines[i].get()));
    });
    Json modes = Json::array();
    std::size_t eager = 0;
    for (std::size_t i = 0; i < kModes.size(); ++i) {
      eager = kModes[i].graphs == nullptr ? i : eager;
      modes.push_back(mode_json(kModes[i], times[i], times[eager], engines[i].get()));
    }
    return {{"benchmark", "mixture"},           {"version", version()},
            {"device", describe(device_).name}, {"tokens", settings_.batch * settings_.shape.seq},
            {"layers", settings_.shape.layers}, {"hidden", settings_.shape.hidden},
            {"ffn", settings_.shape.ffn},       {"experts", settings_.shape.experts},
            {"top_k", settings_.shape.top_k},   {"capacity", settings_.capacity},
            {"dtype", settings_.dtype},         {"rounds", settings_.rounds},
            {"modes", std::move(modes)}};
  }

 private:
  [[nodiscard]] MixtureModel make_model(double capacity) const {
    at::manual_seed(1);
    MixtureShape shape = settings_.shape;
    shape.capacity = capacity;
    MixtureModel model(shape);
    model->to(device_, settings_.dtype == "bfloat16" ? at::kBFloat16 : at::kFloat);
    return model;
  }
  [[nodiscard]] MixtureModel& model_of(const Mode& mode) { return mode.fixed ? fixed_model_ : model_; }

  [[nodiscard]] std::unique_ptr<OffloadEngine> make_engine(const Mode& mode) {
    if (mode.graphs == nullptr) {
      return nullptr;
    }
    Options options(device_);
    options.graph(mode.graphs).min_bytes(static_cast<std::size_t>(settings_.min_kib) << 10);
    if (mode.offload) {
      options.offload("blocks.**");
    }
    if (mode.delay) {
      options.delay("blocks.*.experts.*");
    }
    return std::make_unique<OffloadEngine>(*model_of(mode), options);
  }

  StepTime step(const Mode& mode, OffloadEngine* engine) {
    MixtureModel& model = model_of(mode);
    model->zero_grad();
    return bench::time_of(device_, [&] {
      std::optional<Step> active;
      if (engine != nullptr) {
        active.emplace(engine->step());
      }
      model->loss(windows_).backward();
      if (active) {
        active->finish();
      }
    });
  }

  static Json mode_json(const Mode& mode, const std::vector<StepTime>& times, const std::vector<StepTime>& eager,
                        const OffloadEngine* engine) {
    std::vector<double> wall;
    std::vector<double> cpu;
    std::vector<double> ratio;
    for (std::size_t i = 0; i < times.size(); ++i) {
      wall.push_back(times[i].wall);
      cpu.push_back(times[i].cpu);
      ratio.push_back(times[i].wall / eager[i].wall);
    }
    const Report report = engine != nullptr ? engine->report() : Report{};
    return {{"name", mode.name},
            {"step_ms_median", bench::median(wall) * 1e3},
            {"cpu_ms_median", bench::median(cpu) * 1e3},
            {"step_over_eager_paired_median", bench::median(ratio)},
            {"step_over_eager_lowest", *std::min_element(ratio.begin(), ratio.end())},
            {"step_over_eager_highest", *std::max_element(ratio.begin(), ratio.end())},
            {"offloaded_bytes", report.offloaded_bytes},
            {"captures", report.captures}};
  }

  const Settings& settings_;
  c10::Device device_;
  MixtureModel model_{nullptr};
  MixtureModel fixed_model_{nullptr};
  at::Tensor windows_;
};

int run_all(int argc, char** argv) {
  Settings settings;
  CLI::App app(
      "Times a mixture of experts: eager, with part of each layer, and with whole layers in graphs. Prints JSON.",
      "bench_mixture");
  app.add_option("--device", settings.device)->capture_default_str();
  bench::add_layer_options(app, settings.shape);
  bench::add_positive(app, "--experts", settings.shape.experts);
  bench::add_positive(app, "--top-k", settings.shape.top_k);
  bench::add_positive(app, "--capacity", settings.capacity, "Capacity of the modes with fixed shapes");
  bench::add_positive(app, "--seq", settings.shape.seq);
  bench::add_positive(app, "--batch", settings.batch);
  app.add_option("--dtype", settings.dtype)->check(CLI::IsMember({"float32", "bfloat16"}))->capture_default_str();
  bench::add_positive(app, "--rounds", settings.rounds);
  bench::add_positive(app, "--min-kib", settings.min_kib, "Storages with fewer KiB stay on the device");
  CLI11_PARSE(app, argc, argv);
  std::fputs((MixtureBench(settings).measure().dump(2) + "\n").c_str(), stdout);
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return bench::run_benchmark("bench_mixture", run_all, argc, argv); }
