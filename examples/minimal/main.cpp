// The smallest trainer that uses Sidestream: a stack of blocks whose saved activations are offloaded.
//
//   minimal [auto|cuda|cuda:N|sim]
#include <iostream>
#include <string>

#include <ATen/Functions.h>
#include <sidestream/sidestream.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

namespace ss = sidestream;

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) : up(width, 4 * width), down(4 * width, width) {
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) {
    ss::OffloadScope scope("mlp");  // what autograd saves until here ends is the group "blocks.N.mlp"
    return x + down(at::gelu(up(x)));
  }
  torch::nn::Linear up, down;
};
TORCH_MODULE(Block);

struct ModelImpl : torch::nn::Module {
  ModelImpl(int64_t layers, int64_t width) {
    register_module("blocks", blocks);
    for (int64_t i = 0; i < layers; ++i) {
      blocks->push_back(Block(width));
    }
  }
  at::Tensor forward(at::Tensor h) {
    for (const auto& block : *blocks) {
      h = ss::call(block->as<Block>(), h);  // in place of block->forward(h); named "blocks.N" by named_modules()
    }
    return h;
  }
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Model);

int main(int argc, char** argv) {
  const c10::Device device = ss::find_device(argc > 1 ? argv[1] : "auto");
  const int64_t rows = 1024, width = 64;
  Model model(/*layers=*/6, width);
  model->to(device);
  torch::optim::SGD optimizer(model->parameters(), /*lr=*/0.05);

  // Each block becomes a graph, and its group is offloaded. Without graph(...) the blocks run eagerly, and are offloaded too.
  ss::OffloadEngine engine(*model, ss::Options(device).graph("blocks.*").offload("blocks.*.mlp").min_bytes(64 << 10));
  for (int i = 0; i < 20; ++i) {
    const at::Tensor x = at::randn({rows, width}).to(device);
    auto step = engine.step();  // until its end, calls and scopes on this thread belong to the step
    const at::Tensor loss = (model->forward(x) - x.cos()).square().mean();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    if (i % 5 == 4) {
      std::cout << "step " << i + 1 << "  loss " << loss.item<float>() << '\n';
    }
  }
  engine.report().print(std::cout);  // what was offloaded, what stayed, and why
}
