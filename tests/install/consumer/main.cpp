#include <sidestream/sidestream.h>

#include <ATen/Functions.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <cstring>
#include <iostream>
#include <memory>
#include <vector>

// A trainer as a user writes it against the installed tree: the same steps plain and with graphed, offloaded blocks.

static_assert(__cplusplus == 201703L, "the consumer is C++17");
namespace ss = sidestream;

namespace {

constexpr int kBlocks = 4;
constexpr int kWidth = 16;

struct BlockImpl : torch::nn::Module {
  BlockImpl() : up(kWidth, 4 * kWidth), down(4 * kWidth, kWidth) {
    register_module("up", up);
    register_module("down", down);
  }

  at::Tensor forward(const at::Tensor& x) {
    at::Tensor hidden;
    {
      ss::OffloadScope scope("up");
      hidden = at::gelu(up->forward(x));
    }
    return x + down->forward(hidden);
  }

  torch::nn::Linear up;
  torch::nn::Linear down;
};
TORCH_MODULE(Block);

struct Model : torch::nn::Module {
  Model() {
    register_module("blocks", blocks);
    for (int i = 0; i < kBlocks; ++i) {
      blocks->push_back(Block());
    }
  }

  at::Tensor forward(at::Tensor h) {
    for (const auto& block : *blocks) {
      h = ss::call(block->as<Block>(), h);
    }
    return h;
  }

  torch::nn::ModuleList blocks;
};

std::vector<at::Tensor> train(c10::Device device, bool graphed) {
  torch::manual_seed(1);
  Model model;
  model.to(device);
  std::unique_ptr<ss::OffloadEngine> engine;
  if (graphed) {
    engine = std::make_unique<ss::OffloadEngine>(
        model, ss::Options(device).graph("blocks.*").offload("blocks.*.up").min_bytes(1));
  }
  std::vector<at::Tensor> gradients;
  for (int step = 0; step < 3; ++step) {
    const at::Tensor data = at::randn({8, kWidth}).to(device);
    model.zero_grad();
    if (engine) {
      auto active = engine->step();
      model.forward(data).square().sum().backward();
    } else {
      model.forward(data).square().sum().backward();
    }
    for (const auto& parameter : model.parameters()) {
      gradients.push_back(parameter.grad().to(at::kCPU).clone());
    }
  }
  return gradients;
}

}  // namespace

int main() {
  const bool same_version = std::strcmp(ss::version(), SIDESTREAM_VERSION) == 0;
  const c10::Device device = ss::find_device("sim");
  const auto plain = train(device, false);
  const auto graphed = train(device, true);
  bool equal = plain.size() == graphed.size() && !plain.empty();
  for (std::size_t i = 0; equal && i < plain.size(); ++i) {
    equal = at::equal(plain[i], graphed[i]);
  }
  std::cout << "sidestream " << ss::version() << ", " << plain.size() << " gradients "
            << (equal ? "equal" : "different") << '\n';
  return same_version && equal ? 0 : 1;
}
