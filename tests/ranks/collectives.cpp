// Collectives inside of graphs: NCCL in two processes, each on a GPU of its own. Tensor-parallel layers as graphed calls and as callables,
// and a whole step that sums its gradients over the ranks before its update. Each step's gradients must equal those of the same program
// without an engine bit for bit.
//
//   collectives    starts both ranks; exit code 0 if all was equal, 77 where that cannot run
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ops/equal.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/rms_norm.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "examples/pipeline/ranks.h"
#include "sidestream/sidestream.h"
#include "tests/ranks/nccl_ranks.h"

namespace {

namespace ss = sidestream;
using namespace sidestream::testing_ranks;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int kSteps = 6;
constexpr std::int64_t kRows = 4096;  // so many that work is late: what is read too early has other bytes
constexpr std::int64_t kWidth = 1024;

/// The ranks of this program.
c10::intrusive_ptr<c10d::Backend>& ranks() {
  static c10::intrusive_ptr<c10d::Backend> group;
  return group;
}

c10::intrusive_ptr<c10d::Work> begin_sum(const at::Tensor& tensor) {
  std::vector<at::Tensor> tensors{tensor};
  return ranks()->allreduce(tensors);
}
void sum_over_ranks(const at::Tensor& tensor) { begin_sum(tensor)->wait(); }

/// y = x w^T, with the columns of y on this rank. In backward the input's gradient is summed over the ranks beside the product that gives
/// the weight's.
struct ColumnParallel : torch::autograd::Function<ColumnParallel> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& w) {
    context->save_for_backward({x, w});
    return at::linear(x, w);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor of_input = gradients[0].matmul(saved[1]);
    const auto sum = begin_sum(of_input);
    const at::Tensor of_weight = gradients[0].t().matmul(saved[0]);
    sum->wait();
    return {of_input, of_weight};
  }
};

/// The sum over the ranks; the gradient passes.
struct SumOverRanks : torch::autograd::Function<SumOverRanks> {
  static at::Tensor forward(AutogradContext* /*context*/, const at::Tensor& x) {
    const at::Tensor sum = x.clone();
    sum_over_ranks(sum);
    return sum;
  }
  static variable_list backward(AutogradContext* /*context*/, const variable_list& gradients) { return gradients; }
};

/// A block whose hidden units are dealt out over the ranks.
struct Block : torch::nn::Module {
  explicit Block(int rank) {
    norm = register_parameter("norm", at::ones({kWidth}));
    at::manual_seed(40 + rank);
    up = register_parameter("up", at::randn({2 * kWidth, kWidth}) / 32);
    down = register_parameter("down", at::randn({kWidth, 2 * kWidth}) / 48);
  }
  at::Tensor forward(const at::Tensor& h) {
    ss::OffloadScope scope("mlp");
    const at::Tensor x = at::rms_norm(h, {kWidth}, norm, 1e-5);
    return h + SumOverRanks::apply(at::linear(at::gelu(ColumnParallel::apply(x, up)), down));
  }
  at::Tensor norm, up, down;
};

struct Model : torch::nn::Module {
  Model(int rank, c10::Device device) {
    register_module("blocks", blocks);
    for (int i = 0; i < 3; ++i) {
      blocks->push_back(std::make_shared<Block>(rank));
    }
    to(device);
  }
  at::Tensor loss(at::Tensor h) {
    for (const auto& block : *blocks) {
      h = ss::call(block->as<Block>(), h);
    }
    return h.square().mean();
  }
  torch::nn::ModuleList blocks;
};

/// All ranks capture, or none.
bool all_agree(c10::Device device, bool mine) {
  const at::Tensor all = at::ones({1}, at::TensorOptions().dtype(at::kInt).device(device)) * (mine ? 1 : 0);
  std::vector<at::Tensor> tensors{all};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MIN;
  ranks()->allreduce(tensors, options)->wait();
  return all.item<int>() == 1;
}
ss::GraphOptions graph_options(c10::Device device, std::int64_t side_streams) {
  return ss::GraphOptions().side_streams(side_streams).agree_to_capture([device](bool mine) {
    return all_agree(device, mine);
  });
}

/// Gradients of both are equal; then both take a step of descent.
void compare_and_descend(Model& mine, Model& plain, int step, const std::string& what) {
  const auto ours = mine.named_parameters();
  for (const auto& item : plain.named_parameters()) {
    require(at::equal(ours[item.key()].grad(), item.value().grad()),
            what + ": step " + std::to_string(step) + ": the gradient of " + item.key() + " differs");
  }
  const at::NoGradGuard no_grad;
  for (Model* model : {&mine, &plain}) {
    for (at::Tensor& parameter : model->parameters()) {
      parameter.sub_(parameter.grad(), 0.1);
      parameter.mutable_grad().reset();
    }
  }
}

void train_calls(int rank, c10::Device device, std::int64_t side_streams, ss::GradientPolicy policy, bool checks) {
  const std::string what = "calls on " + std::to_string(side_streams) + " side streams";
  Model mine(rank, device);
  Model plain(rank, device);
  ss::OffloadEngine engine(mine, ss::Options(device)
                                     .graph("blocks.*")
                                     .offload("blocks.*.mlp")
                                     .check_steps(checks ? kSteps : 0)
                                     .graph_options(graph_options(device, side_streams).gradients("**", policy)));
  at::manual_seed(7);
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor x = at::randn({kRows, kWidth}).to(device);
    {
      auto scope = engine.step();
      mine.loss(x).backward();
      engine.backward_dw();
    }
    plain.loss(x).backward();
    compare_and_descend(mine, plain, step, what);
  }
  const ss::Report report = engine.report();
  require(report.replays > 0 && report.offloaded_bytes > 0, what + ": nothing was replayed, or nothing was offloaded");
  for (const std::string& finding : report.order_findings) {
    throw std::runtime_error(what + ": " + finding);
  }
}

/// From step 3 on, rank 1 would have to capture again, and rank 0 has nothing to capture. So rank 1 runs its calls eagerly.
void train_where_ranks_differ(int rank, c10::Device device) {
  Model mine(rank, device);
  Model plain(rank, device);
  ss::OffloadEngine engine(
      mine, ss::Options(device).graph("blocks.*").offload("blocks.*.mlp").graph_options(graph_options(device, 1)));
  at::manual_seed(9);
  for (int step = 0; step < kSteps; ++step) {
    if (step == 3 && rank == 1) {
      for (at::Tensor& parameter : mine.parameters()) {
        parameter.set_data(parameter.clone());
      }
    }
    const at::Tensor x = at::randn({kRows, kWidth}).to(device);
    {
      auto scope = engine.step();
      mine.loss(x).backward();
    }
    plain.loss(x).backward();
    compare_and_descend(mine, plain, step, "ranks that differ");
  }
  const bool replayed = engine.report().replays > 0;  // in the last step
  require(replayed == (rank == 0), replayed ? "rank 1 captured alone" : "rank 0 did not replay");
}

void train_callables(int rank, c10::Device device) {
  Model mine(rank, device);
  Model plain(rank, device);
  ss::OffloadEngine engine(mine, ss::Options(device).offload("blocks.*.mlp"));
  std::vector<ss::Callable> bodies;
  std::vector<std::vector<ss::Sample>> samples;
  for (std::size_t i = 0; i < mine.blocks->size(); ++i) {
    bodies.emplace_back(
        "blocks." + std::to_string(i),
        [](Block& block, const ss::Tensors& in) { return ss::Tensors{block.forward(in[0])}; },
        mine.blocks->ptr<Block>(i));
    if (i == 0) {
      samples.push_back({at::randn({kRows, kWidth}).to(device).requires_grad_(true)});
    } else {
      samples.push_back({ss::Sample::output_of(static_cast<std::int64_t>(i) - 1, 0)});
    }
  }
  const auto graphed = ss::make_graphed_callables(engine, bodies, samples, graph_options(device, 2));
  at::manual_seed(8);
  for (int step = 0; step < kSteps; ++step) {
    const at::Tensor x = at::randn({kRows, kWidth}).to(device).requires_grad_(true);
    at::Tensor h = x;
    for (const ss::GraphedCallable& block : graphed) {
      h = block({h})[0];
    }
    h.square().mean().backward();
    const at::Tensor of_input = x.grad();
    x.mutable_grad().reset();
    plain.loss(x).backward();
    require(at::equal(of_input, x.grad()), "callables: the gradient of the input differs");
    compare_and_descend(mine, plain, step, "callables");
  }
}

/// Each rank has rows of its own; the graph sums the gradients over the ranks.
void train_whole_steps(int rank, c10::Device device) {
  Model mine(rank, device);
  Model plain(rank, device);
  ss::AdamW optimizer(mine.parameters(), ss::AdamWOptions(1e-3));
  ss::AdamW plain_optimizer(plain.parameters(), ss::AdamWOptions(1e-3));
  const auto update = [](Model& model, ss::AdamW& with) {
    for (const at::Tensor& parameter : model.parameters()) {
      sum_over_ranks(parameter.grad());
    }
    ss::clip_grad_norm_(model.parameters(), 1.0);
    with.step();
  };
  ss::OffloadEngine engine(mine, ss::Options(device).offload("**.mlp"));
  at::manual_seed(60 + rank);
  const auto next = [&] { return at::randn({kRows, kWidth}).to(device); };
  const ss::GraphedStep graphed = ss::make_graphed_step(
      engine,
      ss::Callable("step", ss::owning([&mine](const ss::Tensors& in) { return ss::Tensors{mine.loss(in[0])}; })),
      {{next()}, {next()}}, ss::StepOptions().update([&] { update(mine, optimizer); }).graph(graph_options(device, 1)));
  require(graphed.offloaded_bytes() > 0, "whole steps: nothing is offloaded");
  for (int step = 0; step < kSteps; ++step) {
    const std::vector<ss::Tensors> batches{{next()}, {next()}};
    (void)graphed(batches);
    for (const at::Tensor& parameter : plain.parameters()) {
      parameter.mutable_grad().reset();
    }
    for (const ss::Tensors& batch : batches) {
      plain.loss(batch[0]).backward();
    }
    update(plain, plain_optimizer);
    for (const auto& item : plain.named_parameters()) {
      require(at::equal(mine.named_parameters()[item.key()], item.value()),
              "whole steps: step " + std::to_string(step) + ": " + item.key() + " differs");
    }
  }
}

}  // namespace

int main() try {
  const auto place = pipeline::rank_environment();
  if (!place) {
    if (const std::string what = missing_for_nccl(); !what.empty()) {
      std::cerr << "skipped: " << what << '\n';
      return kSkipped;
    }
    const pipeline::RanksEnd end = pipeline::run_ranks(2);
    std::cerr << end.failed << '\n';
    return end.code;
  }
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);  // the same algorithms inside and outside of graphs
  const c10::Device device = ss::find_device("cuda:" + std::to_string(place->rank));
  const c10::DeviceGuard current(device);
  ranks() = make_nccl<Nccl>(pipeline::connect(*place, kLimit), place->rank);
  const auto done = [&](const std::string& what) {
    if (place->rank == 0) {
      std::cerr << "collectives: " << what << ": equal\n";
    }
  };
  train_calls(place->rank, device, 1, ss::GradientPolicy::cloned, false);
  done("calls on one side stream");
  train_calls(place->rank, device, 2, ss::GradientPolicy::accumulated, true);
  done("calls on two side streams, accumulated and checked");
  train_calls(place->rank, device, 2, ss::GradientPolicy::delayed, false);
  done("calls with delayed weight gradients");
  train_where_ranks_differ(place->rank, device);
  done("calls of ranks that differ");
  train_callables(place->rank, device);
  done("callables");
  train_whole_steps(place->rank, device);
  done("whole steps");
  ss::synchronize(device);
  ranks()->shutdown();
  ranks().reset();
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
