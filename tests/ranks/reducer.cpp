// c10d's Reducer with graphed calls, in two processes on the simulated device. Each step's gradients must equal those of plain data-parallel
// training bit for bit: plain backwards, then the mean over the ranks.
//
//   reducer         starts both ranks; exit code 0 if all was equal
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/randn.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "examples/pipeline/ranks.h"
#include "examples/pipeline/store_backend.h"
#include "sidestream/sidestream.h"

namespace {

namespace ss = sidestream;

constexpr int kSteps = 8;
constexpr std::int64_t kRows = 24;
const std::vector<std::int64_t> kWidths{16, 24, 40, 8};  // no two parameters have the same size

struct LayerImpl : torch::nn::Module {
  LayerImpl(std::int64_t in, std::int64_t out) : linear(register_module("linear", torch::nn::Linear(in, out))) {}
  at::Tensor forward(const at::Tensor& x) {
    ss::OffloadScope scope("mlp");
    return at::gelu(linear(x));
  }
  torch::nn::Linear linear;
};
TORCH_MODULE(Layer);

struct ModelImpl : torch::nn::Module {
  ModelImpl() {
    register_module("layers", layers);
    for (std::size_t i = 0; i + 1 < kWidths.size(); ++i) {
      layers->push_back(Layer(kWidths[i], kWidths[i + 1]));
    }
  }
  at::Tensor loss(at::Tensor h) {
    for (const auto& layer : *layers) {
      h = ss::call(layer->as<Layer>(), h);
    }
    return h.square().mean();
  }
  torch::nn::ModuleList layers;
};
TORCH_MODULE(Model);

/// Notes the sizes of the buckets in the order in which they are reduced.
class NotedBackend final : public pipeline::StoreBackend {
 public:
  using StoreBackend::StoreBackend;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    sizes.push_back(tensors.front().numel());
    return StoreBackend::allreduce(tensors, options);
  }
  std::vector<std::int64_t> sizes;
};

void require(bool holds, const std::string& what) {
  if (!holds) {
    throw std::runtime_error(what);
  }
}

/// A model, its optimizer with clipping, and a schedule of learning rates.
struct Trainer {
  explicit Trainer(c10::Device device) {
    at::manual_seed(3);
    model = Model();
    model->to(device);
    optimizer.emplace(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  }
  void update(int step) {
    torch::nn::utils::clip_grad_norm_(model->parameters(), 0.05);
    static_cast<torch::optim::SGDOptions&>(optimizer->param_groups()[0].options()).lr(0.1 / (1 + step));
    optimizer->step();
    optimizer->zero_grad();
  }
  Model model{nullptr};
  std::optional<torch::optim::SGD> optimizer;
};

void train(int rank, const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<NotedBackend>& ranks) {
  const c10::Device device = ss::find_device("sim");
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, 2);
  group->setBackend(device.type(), c10d::ProcessGroup::BackendType::CUSTOM, ranks);
  Trainer graphed(device);
  Trainer plain(device);
  const std::vector<at::Tensor> parameters = graphed.model->parameters();
  std::vector<std::vector<std::size_t>> buckets;
  for (std::size_t i = parameters.size(); i-- > 0;) {
    buckets.push_back({i});
  }
  c10d::Reducer reducer(parameters, buckets, group, std::vector<bool>(parameters.size(), false),
                        /*bucket_bytes_cap=*/1, /*find_unused_parameters=*/false, /*gradient_as_bucket_view=*/false, {},
                        /*first_bucket_bytes_cap=*/1, /*skip_all_reduce_unused_params=*/false,
                        /*use_python_reducer=*/false, {});
  ss::OffloadEngine engine(*graphed.model, ss::Options(device).graph("layers.*").offload("layers.*.mlp").min_bytes(64));

  at::manual_seed(100 + rank);  // each rank has data of its own
  for (int step = 0; step < kSteps; ++step) {
    const int microbatches = 1 + step % 2;  // every second step accumulates
    ranks->sizes.clear();
    std::vector<at::Tensor> inputs;
    {
      auto scope = engine.step();
      for (int microbatch = 0; microbatch < microbatches; ++microbatch) {
        inputs.push_back(at::randn({kRows, kWidths.front()}).to(device));
        const bool reduces = microbatch + 1 == microbatches;  // else: no_sync
        if (reduces) {
          reducer.prepare_for_forward();
          reducer.rebuild_buckets();
        }
        ranks->sizes.clear();
        const at::Tensor loss = graphed.model->loss(inputs.back());
        if (reduces) {
          reducer.prepare_for_backward({});
        }
        loss.backward();
        require(reduces || ranks->sizes.empty(), "a gradient was reduced before its last microbatch");
      }
    }
    const std::vector<std::int64_t> order = ranks->sizes;
    require(order.size() == parameters.size(), "not each bucket was reduced once");
    for (std::size_t i = 0; i < order.size(); ++i) {  // two parameters a layer, the last layer first
      const std::size_t layer = kWidths.size() - 2 - i / 2;
      require(order[i] == kWidths[layer + 1] || order[i] == kWidths[layer] * kWidths[layer + 1],
              "bucket " + std::to_string(i) + " was not ready in the order of the graphs");
    }
    for (const at::Tensor& input : inputs) {
      plain.model->loss(input).backward();
    }
    for (const auto& item : plain.model->named_parameters()) {
      std::vector<at::Tensor> mean{item.value().grad() / 2};
      ranks->StoreBackend::allreduce(mean, {})->wait();
      item.value().mutable_grad() = mean.front();
      const at::Tensor ours = graphed.model->named_parameters()[item.key()].grad();
      require(at::equal(ours.cpu(), mean.front().cpu()),
              "step " + std::to_string(step) + ": the gradient of " + item.key() + " differs");
    }
    graphed.update(step);
    plain.update(step);
  }
  const ss::Report report = engine.report();
  require(report.captures > 0 && report.offloaded_bytes > 0, "nothing was captured, or nothing was offloaded");
}

}  // namespace

int main() try {
  const auto place = pipeline::rank_environment();
  if (!place) {
    const pipeline::RanksEnd end = pipeline::run_ranks(2);
    std::cerr << end.failed << '\n';
    return end.code;
  }
  const std::chrono::minutes limit{2};
  const auto store = pipeline::connect(*place, limit);
  const auto ranks = c10::make_intrusive<NotedBackend>(store, place->rank, place->size, limit);
  try {
    train(place->rank, store, ranks);
  } catch (const std::exception& error) {
    ranks->fail("rank " + std::to_string(place->rank) + " failed: " + error.what(), place->serves_store);
    throw;
  }
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
