// Trains a stack of blocks in a pipeline: one process for each rank, in the interleaved order, with blocks as graphs and their
// activations offloaded. The ranks pass tensors through a store of c10d.
//
//   pipeline [RANKS]              starts all ranks on this machine, 2 if not given
//
// To start ranks yourself, on several machines for example, set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each.
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <sidestream/sidestream.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "pipeline.h"
#include "ranks.h"
#include "store_backend.h"

namespace ss = sidestream;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) : up(width, 4 * width), down(4 * width, width) {
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) {
    ss::OffloadScope scope("mlp");
    return x + down(at::gelu(up(x)));
  }
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

/// The blocks of one rank: `blocks_of_stage` for each of its virtual stages.
struct RankModelImpl : torch::nn::Module {
  RankModelImpl() { register_module("blocks", blocks); }
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(RankModel);

void train(const pipeline::RankEnvironment& place, c10::intrusive_ptr<pipeline::StoreBackend> ranks) {
  const c10::Device device = ss::find_device("sim");
  const int64_t rows = 256, width = 32, blocks_of_stage = 4;
  const ss::PipelineShape shape{/*ranks=*/place.size, /*stages=*/2, /*microbatches=*/2 * place.size};
  pipeline::Pipeline chunks(shape, ranks, at::empty({rows, width}, device));

  at::manual_seed(1);
  RankModel model;
  for (int64_t part = 0; part < chunks.parts(); ++part) {
    for (int64_t i = 0; i < blocks_of_stage; ++i) {
      Block block(width);  // made for all parts, so that the weights do not depend on the number of ranks
      if (part % place.size == place.rank) {
        model->blocks->push_back(block);
      }
    }
  }
  model->to(device);
  torch::optim::SGD optimizer(model->parameters(), /*lr=*/0.05);
  ss::OffloadEngine engine(*model, ss::Options(device)
                                       .graph("blocks.*")
                                       .call_options(ss::CallOptions().max_captures(shape.microbatches))
                                       .offload("blocks.*.mlp")
                                       .min_bytes(4096));

  for (int i = 0; i < 20; ++i) {
    std::vector<at::Tensor> x;  // of each microbatch, equal on all ranks
    for (int64_t microbatch = 0; microbatch < shape.microbatches; ++microbatch) {
      x.push_back(at::randn({rows, width}).to(device));
    }
    auto step = engine.step(chunks.order());
    const at::Tensor loss = chunks.step([&](int64_t stage, int64_t microbatch, const at::Tensor& input) {
      const ss::Chunk chunk = engine.chunk({stage, microbatch});
      at::Tensor h = chunks.part(stage) == 0 ? x[microbatch] : input;
      for (int64_t block = stage * blocks_of_stage; block < (stage + 1) * blocks_of_stage; ++block) {
        h = ss::call(model->blocks[block]->as<Block>(), h);
      }
      const bool last = chunks.part(stage) + 1 == chunks.parts();
      return last ? (h - x[microbatch].cos()).square().mean() / shape.microbatches : h;
    });
    optimizer.step();
    optimizer.zero_grad();
    if (loss.defined() && i % 5 == 4) {
      std::cout << "step " << i + 1 << "  loss " << loss.item<float>() << '\n';
    }
  }
  if (place.rank == 0) {
    engine.report().print(std::cout);
  }
}

int main(int argc, char** argv) try {
  const auto place = pipeline::rank_environment();
  if (!place) {
    const pipeline::RanksEnd end = pipeline::run_ranks(argc > 1 ? std::atoi(argv[1]) : 2);
    if (!end.failed.empty()) {
      std::cerr << end.failed << '\n';
    }
    return end.code;
  }
  const std::chrono::minutes limit{5};  // for which a rank waits for another one
  const auto ranks =
      c10::make_intrusive<pipeline::StoreBackend>(pipeline::connect(*place, limit), place->rank, place->size, limit);
  try {
    train(*place, ranks);
    ranks->leave(place->serves_store);
  } catch (const std::exception& error) {
    // So that the others end too.
    ranks->fail("rank " + std::to_string(place->rank) + " failed: " + error.what(), place->serves_store);
    throw;
  }
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
