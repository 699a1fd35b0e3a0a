// What the sim device costs: one training step of a byte transformer on plain CPU tensors, on sim, and on sim under a
// recording; then one block as a captured graph against the same block run eagerly on the CPU. Medians of interleaved runs, one
// thread.
//   bench_sim_step [hidden] [repetitions]

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "runtime/runtime.h"
#include "sim/rerun/recording.h"

namespace {

using Tensors = std::vector<at::Tensor>;

constexpr std::int64_t layers = 4, batch = 8, length = 128, heads = 4, vocabulary = 256;
constexpr std::size_t weights_per_block = 6;

double milliseconds(const std::function<void()>& action) {
  const auto begin = std::chrono::steady_clock::now();
  action();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  return samples[samples.size() / 2];
}

at::Tensor block(at::Tensor x, const at::Tensor* weights) {
  const std::int64_t hidden = x.size(-1);
  const at::Tensor qkv = at::linear(at::rms_norm(x, {hidden}, weights[0]), weights[1])
                             .view({batch, length, 3, heads, hidden / heads})
                             .permute({2, 0, 3, 1, 4});
  const at::Tensor mixed = at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, 0.0, true);
  x = x + at::linear(mixed.transpose(1, 2).reshape({batch, length, hidden}), weights[2]);
  return x + at::linear(at::gelu(at::linear(at::rms_norm(x, {hidden}, weights[3]), weights[4])), weights[5]);
}

Tensors block_weights(std::int64_t hidden, c10::Device device) {
  Tensors weights;
  for (const std::vector<std::int64_t>& size : std::vector<std::vector<std::int64_t>>{
           {hidden}, {3 * hidden, hidden}, {hidden, hidden}, {hidden}, {4 * hidden, hidden}, {hidden, 4 * hidden}}) {
    weights.push_back(
        (size.size() == 1 ? at::ones(size) : at::randn(size) * 0.02).to(device).detach().requires_grad_());
  }
  return weights;
}

/// The whole model with its optimiser on one device.
class Trainer {
 public:
  Trainer(std::int64_t hidden, c10::Device device) {
    at::manual_seed(1);
    weights_.push_back((at::randn({vocabulary, hidden}) * 0.02).to(device).detach().requires_grad_());
    for (std::int64_t layer = 0; layer < layers; ++layer) {
      for (at::Tensor& weight : block_weights(hidden, device)) {
        weights_.push_back(std::move(weight));
      }
    }
    tokens_ = at::randint(vocabulary, {batch, length}, at::kLong).to(device);
    optimizer_ = std::make_unique<torch::optim::AdamW>(weights_, torch::optim::AdamWOptions(1e-3));
  }

  void step() {
    optimizer_->zero_grad();
    at::Tensor x = at::embedding(weights_[0], tokens_);
    for (std::size_t layer = 0; layer < layers; ++layer) {
      x = block(x, &weights_[1 + layer * weights_per_block]);
    }
    at::cross_entropy_loss(at::linear(x, weights_[0]).view({-1, vocabulary}), tokens_.view({-1})).backward();
    optimizer_->step();
  }

 private:
  Tensors weights_;
  at::Tensor tokens_;
  std::unique_ptr<torch::optim::AdamW> optimizer_;
};

void compare_steps(std::int64_t hidden, int repetitions, c10::Device device) {
  Trainer cpu(hidden, at::kCPU), eager(hidden, device), recorded(hidden, device);
  std::vector<double> on_cpu, on_sim, in_recording, with_snapshots;
  std::size_t works = 0;
  for (int i = 0; i < repetitions + 2; ++i) {
    const double cpu_time = milliseconds([&] { cpu.step(); });
    const double sim_time = milliseconds([&] { eager.step(); });
    double step_time = 0;
    const double whole_time = milliseconds([&] {
      sidestream::sim::Recording recording;
      step_time = milliseconds([&] { recorded.step(); });
      recording.stop();
      works = recording.works().size();
    });
    if (i >= 2) {
      on_cpu.push_back(cpu_time);
      on_sim.push_back(sim_time);
      in_recording.push_back(step_time);
      with_snapshots.push_back(whole_time);
    }
  }
  const double base = median(on_cpu);
  std::printf("hidden %lld, step of %lld layers: cpu %.2f ms\n", static_cast<long long>(hidden),
              static_cast<long long>(layers), base);
  std::printf("  sim eager                  %8.2f ms  %.2f x cpu\n", median(on_sim), median(on_sim) / base);
  std::printf("  sim eager, recorded        %8.2f ms  %.2f x cpu  (%zu works)\n", median(in_recording),
              median(in_recording) / base, works);
  std::printf("  the same with snapshots    %8.2f ms  %.2f x cpu\n", median(with_snapshots),
              median(with_snapshots) / base);
}

/// A block's static tensors; `run` gives its output and all gradients.
struct BlockRun {
  BlockRun(std::int64_t hidden, c10::Device device) : weights(block_weights(hidden, device)) {
    x = at::randn({batch, length, hidden}).to(device).requires_grad_();
    grad = at::randn({batch, length, hidden}).to(device);
  }
  Tensors run() const {
    Tensors inputs = weights;
    inputs.push_back(x);
    return torch::autograd::grad({block(x, weights.data())}, inputs, {grad});
  }
  Tensors weights;
  at::Tensor x, grad;
};

void compare_replay(std::int64_t hidden, int repetitions, sidestream::Runtime& runtime) {
  const BlockRun cpu(hidden, at::kCPU), sim(hidden, runtime.device());
  const sidestream::OwnedStream stream = runtime.create_stream();
  const sidestream::MemoryPool pool = runtime.create_pool();
  Tensors results;
  sidestream::Graph graph;
  {
    const sidestream::StreamGuard guard(runtime, stream.get());
    runtime.begin_capture(stream.get(), pool);
    results = sim.run();
    graph = runtime.end_capture(stream.get());
  }
  std::vector<double> on_cpu, eager, replayed;
  for (int i = 0; i < repetitions + 2; ++i) {
    const double cpu_time = milliseconds([&] { (void)cpu.run(); });
    const double eager_time = milliseconds([&] { (void)sim.run(); });
    const double replay_time = milliseconds([&] {
      runtime.launch(graph, stream.get());
      runtime.synchronize(stream.get());
    });
    if (i >= 2) {
      on_cpu.push_back(cpu_time);
      eager.push_back(eager_time);
      replayed.push_back(replay_time);
    }
  }
  const double base = median(on_cpu);
  std::printf("hidden %lld, one block forward and backward: cpu %.2f ms\n", static_cast<long long>(hidden), base);
  std::printf("  sim eager                  %8.2f ms  %.2f x cpu\n", median(eager), median(eager) / base);
  std::printf("  graph replay               %8.2f ms  %.2f x cpu\n", median(replayed), median(replayed) / base);
}

}  // namespace

int main(int argc, char** argv) {
  const std::int64_t hidden = argc > 1 ? std::atoll(argv[1]) : 128;
  const int repetitions = argc > 2 ? std::atoi(argv[2]) : 21;
  if (hidden <= 0 || hidden % heads != 0 || repetitions <= 0) {
    std::fprintf(stderr, "usage: %s [hidden, a multiple of %lld] [repetitions]\n", argv[0],
                 static_cast<long long>(heads));
    return 2;
  }
  at::set_num_threads(1);
  const auto runtime = sidestream::make_runtime(c10::Device(c10::DeviceType::PrivateUse1, 0));
  compare_steps(hidden, repetitions, runtime->device());
  compare_replay(hidden, repetitions, *runtime);
  return 0;
}
