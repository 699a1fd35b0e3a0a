// What a chunk costs the host over the same calls outside of chunks, in a step without an order and in one with it: layers of so few
// elements that the device is never what limits.
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ops/ones.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "sidestream/sidestream.h"
#include "tools/bench/bench_program.h"
#include "tools/bench/scaled_layers.h"
#include "tools/bench/step_time.h"

namespace sidestream {
namespace {

struct Setting {
  std::string device = "auto";
  std::int64_t layers = 3;
  std::int64_t ranks = 1;
  std::int64_t microbatches = 8;
  std::int64_t steps = 500;
  bool input_gradient = true;
};

const std::string calls = "calls";
const std::string chunks = "chunks";
const std::string chunks_in_order = "chunks_in_order";

/// Trains the first rank's order.
class Rank {
 public:
  Rank(const Setting& setting, const std::string& mode)
      : setting_(setting),
        in_chunks_(mode != calls),
        in_order_(mode == chunks_in_order),
        device_(find_device(setting.device)),
        order_(pipeline_order({setting.ranks, 1, setting.microbatches}, 0)),
        model_(setting.layers),
        outputs_(static_cast<std::size_t>(setting.microbatches)) {
    model_.to(device_);
    engine_.emplace(model_, Options(device_)
                                .graph("blocks.*")
                                .call_options(CallOptions().max_captures(setting.microbatches))
                                .graph_options(GraphOptions().gradients("**", GradientPolicy::accumulated)));
    x_ = at::ones({bench::Scaled::kElements}).to(device_).requires_grad_(setting.input_gradient);
    gradient_ = at::ones({bench::Scaled::kElements}).to(device_);
    for (int i = 0; i < 5; ++i) {
      (void)step();
    }
  }

  struct Taken {
    double forward = 0;  ///< seconds of the thread that calls
    double step = 0;     ///< of the process
  };
  Taken step() {
    Taken taken;
    const double begin = bench::cpu_seconds();
    Step step = in_order_ ? engine_->step(order_) : engine_->step();
    for (const PipelineStep& work : order_) {
      at::Tensor& output = outputs_[static_cast<std::size_t>(work.microbatch)];
      if (work.kind == PipelineStep::Kind::backward) {
        output.backward(gradient_);
        output = at::Tensor();
        if (setting_.input_gradient) {
          x_.mutable_grad() = at::Tensor();
        }
        continue;
      }
      const double forward = bench::thread_cpu_seconds();
      if (!in_chunks_) {
        output = model_.forward(x_);
      } else {
        Chunk chunk = engine_->chunk({work.stage, work.microbatch});
        output = model_.forward(x_);
        chunk.finish();
      }
      taken.forward += bench::thread_cpu_seconds() - forward;
    }
    step.finish();
    taken.step = bench::cpu_seconds() - begin;
    synchronize(device_);
    return taken;
  }
  [[nodiscard]] Report report() const { return engine_->report(); }

 private:
  Setting setting_;
  bool in_chunks_;
  bool in_order_;
  c10::Device device_;
  std::vector<PipelineStep> order_;
  bench::ScaledLayers model_;
  std::optional<OffloadEngine> engine_;
  at::Tensor x_;
  at::Tensor gradient_;
  std::vector<at::Tensor> outputs_;
};

/// Microseconds of a chunk, medians over steps that take turns.
nlohmann::json run(const Setting& setting, const std::vector<std::string>& modes) {
  std::vector<std::unique_ptr<Rank>> ranks;
  for (const std::string& mode : modes) {
    ranks.push_back(std::make_unique<Rank>(setting, mode));
  }
  std::vector<std::vector<double>> forwards(ranks.size());
  std::vector<std::vector<double>> steps(ranks.size());
  bench::in_turns(ranks.size(), setting.steps, [&](std::size_t i) {
    const Rank::Taken taken = ranks[i]->step();
    forwards[i].push_back(taken.forward);
    steps[i].push_back(taken.step);
  });
  nlohmann::json all = {{"device", describe(find_device(setting.device)).name},
                        {"layers", setting.layers},
                        {"ranks", setting.ranks},
                        {"microbatches", setting.microbatches},
                        {"input_gradient", setting.input_gradient}};
  const double scale = 1e6 / static_cast<double>(setting.microbatches);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    const Report report = ranks[i]->report();
    if (report.replays != 2 * setting.layers * setting.microbatches) {
      throw UsageError(fmt::format("a step replayed {} graphs instead of {}", report.replays,
                                   2 * setting.layers * setting.microbatches));
    }
    all[modes[i]] = {{"forward_us", scale * bench::median(forwards[i])}, {"step_us", scale * bench::median(steps[i])}};
  }
  return all;
}

int run_all(int argc, char** argv) {
  CLI::App app(
      "Compares the CPU time of chunks to that of the same calls outside of chunks: microseconds of one microbatch, "
      "for its forward, and for all of a step");
  Setting setting;
  std::vector<std::string> modes{calls, chunks, chunks_in_order};
  app.add_option("--device", setting.device, "auto, cuda or sim")->capture_default_str();
  bench::add_positive(app, "--layers", setting.layers, "Calls of a chunk");
  bench::add_positive(app, "--ranks", setting.ranks, "Microbatches in flight: those of the first of so many ranks");
  bench::add_positive(app, "--microbatches", setting.microbatches);
  bench::add_positive(app, "--steps", setting.steps);
  app.add_option("--input-gradient", setting.input_gradient, "Whether backwards give a gradient of the chunk's input")
      ->capture_default_str();
  app.add_option("--modes", modes, "Which of them; calls are outside of chunks")
      ->check(CLI::IsMember(modes))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  std::fputs((run(setting, modes).dump(2) + "\n").c_str(), stdout);
  return 0;
}

}  // namespace
}  // namespace sidestream

int main(int argc, char** argv) {
  return sidestream::bench::run_benchmark("bench_chunks", sidestream::run_all, argc, argv);
}
