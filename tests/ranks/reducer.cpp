// c10d's Reducer with graphed calls, in two processes. Each step's gradients must equal those of plain data-parallel training bit for bit:
// plain backwards, then the mean over the ranks.
//
//   reducer         starts both ranks on the simulated device; exit code 0 if all was equal
//   reducer nccl    the same with NCCL, each rank on a GPU of its own; exit code 77 where that cannot run
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/randn.h>
#include <c10/core/DeviceGuard.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "examples/pipeline/ranks.h"
#include "examples/pipeline/store_backend.h"
#include "sidestream/sidestream.h"
#include "tests/ranks/nccl_ranks.h"

namespace {

namespace ss = sidestream;
using namespace sidestream::testing_ranks;

constexpr int kSteps = 8;

using Sizes = std::vector<std::int64_t>;

/// Of the layers; no two parameters have the same size.
Sizes widths(c10::Device device) { return device.is_cuda() ? Sizes{1024, 1536, 2560, 512} : Sizes{16, 24, 40, 8}; }
/// On a GPU so many that its work is late: a bucket that NCCL reads too early has other bytes.
std::int64_t rows(c10::Device device) { return device.is_cuda() ? 4096 : 24; }

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
  explicit ModelImpl(const Sizes& widths) {
    register_module("layers", layers);
    for (std::size_t i = 0; i + 1 < widths.size(); ++i) {
      layers->push_back(Layer(widths[i], widths[i + 1]));
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
template <class Backend>
class Noted final : public Backend {
 public:
  template <class... Arguments>
  explicit Noted(Sizes& sizes, Arguments&&... arguments)
      : Backend(std::forward<Arguments>(arguments)...), sizes_(sizes) {}
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    sizes_.push_back(tensors.front().numel());
    return Backend::allreduce(tensors, options);
  }

 private:
  Sizes& sizes_;
};

/// A model, its optimizer with clipping, and a schedule of learning rates.
struct Trainer {
  explicit Trainer(c10::Device device) {
    at::manual_seed(3);
    model = Model(widths(device));
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

/// `delays`: graphs after the backward compute the gradients, and the Reducer's hooks run then.
void train(c10::Device device, const c10::intrusive_ptr<c10d::Store>& store,
           const c10::intrusive_ptr<c10d::Backend>& ranks, Sizes& reduced, bool delays) {
  const c10::DeviceGuard current(device);
  const Sizes sizes = widths(device);
  const int rank = ranks->getRank();
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, 2);
  using Type = c10d::ProcessGroup::BackendType;
  group->setBackend(device.type(), device.is_cuda() ? Type::NCCL : Type::CUSTOM, ranks);
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
  ss::GraphOptions graphs;
  if (delays) {
    graphs.gradients("**", ss::GradientPolicy::delayed);
  }
  ss::OffloadEngine engine(
      *graphed.model,
      ss::Options(device).graph("layers.*").offload("layers.*.mlp").min_bytes(64).graph_options(graphs));

  at::manual_seed(100 + rank);  // each rank has data of its own
  for (int step = 0; step < kSteps; ++step) {
    const int microbatches = 1 + step % 2;  // every second step accumulates
    std::vector<at::Tensor> inputs;
    {
      auto scope = engine.step();
      for (int microbatch = 0; microbatch < microbatches; ++microbatch) {
        inputs.push_back(at::randn({rows(device), sizes.front()}).to(device));
        const bool reduces = microbatch + 1 == microbatches;  // else: no_sync
        if (reduces) {
          reducer.prepare_for_forward();
          reducer.rebuild_buckets();
        }
        reduced.clear();
        const at::Tensor loss = graphed.model->loss(inputs.back());
        if (reduces) {
          reducer.prepare_for_backward({});
        }
        loss.backward();
        require(!delays || step == 0 || reduced.empty(), "a gradient was reduced before backward_dw");
        engine.backward_dw();
        require(reduces || reduced.empty(), "a gradient was reduced before its last microbatch");
      }
    }
    const Sizes order = reduced;
    require(order.size() == parameters.size(), "not each bucket was reduced once");
    for (std::size_t i = 0; i < order.size(); ++i) {  // two parameters a layer, the last layer first
      const std::size_t layer = sizes.size() - 2 - i / 2;
      require(order[i] == sizes[layer + 1] || order[i] == sizes[layer] * sizes[layer + 1],
              "bucket " + std::to_string(i) + " was not ready in the order of the graphs");
    }
    for (const at::Tensor& input : inputs) {
      plain.model->loss(input).backward();
    }
    for (const auto& item : plain.model->named_parameters()) {
      std::vector<at::Tensor> mean{item.value().grad() / 2};
      ranks->allreduce(mean, {})->wait();
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

int main(int argc, char** argv) try {
  const bool nccl = argc > 1 && std::string_view(argv[1]) == "nccl";
  const auto place = pipeline::rank_environment();
  if (!place) {
    if (const std::string missing = nccl ? missing_for_nccl() : ""; !missing.empty()) {
      std::cerr << "skipped: " << missing << '\n';
      return kSkipped;
    }
    const pipeline::RanksEnd end = pipeline::run_ranks(2);
    std::cerr << end.failed << '\n';
    return end.code;
  }
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);  // the same algorithms inside and outside of graphs
  const c10::Device device = ss::find_device(nccl ? "cuda:" + std::to_string(place->rank) : "sim");
  const auto store = pipeline::connect(*place, kLimit);
  Sizes reduced;
  const auto host =
      c10::make_intrusive<Noted<pipeline::StoreBackend>>(reduced, store, place->rank, place->size, kLimit);
  try {
    c10::intrusive_ptr<c10d::Backend> ranks = host;
    if (nccl) {
      ranks = make_nccl<Noted<Nccl>>(store, place->rank, reduced);
    }
    for (const bool delays : {false, true}) {
      train(device, store, ranks, reduced, delays);
    }
    ranks->shutdown();
  } catch (const std::exception& error) {
    host->fail("rank " + std::to_string(place->rank) + " failed: " + error.what(), place->serves_store);
    throw;
  }
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
