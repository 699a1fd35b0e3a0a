// make_graphed_step: forward, backward and update as one graph, for a step that nothing on the host decides about.
//
//   graphed_step [auto|cuda|cuda:N|sim]
#include <cmath>
#include <iostream>
#include <vector>

#include <ATen/Functions.h>
#include <sidestream/sidestream.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

namespace ss = sidestream;

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(int64_t width) : up(width, 4 * width), down(4 * width, width) {
    register_module("up", up);
    register_module("down", down);
  }
  ss::Tensors loss(const ss::Tensors& inputs) {
    ss::OffloadScope scope("mlp");
    const at::Tensor y = inputs[0] + down(at::gelu(up(inputs[0])));
    return {(y - inputs[1]).square().mean()};
  }
  torch::nn::Linear up, down;
};
TORCH_MODULE(Model);

int main(int argc, char** argv) {
  const c10::Device device = ss::find_device(argc > 1 ? argv[1] : "auto");
  const int64_t rows = 512, width = 64, steps = 20;
  Model model(width);
  model->to(device);
  ss::AdamW optimizer(model->parameters(), ss::AdamWOptions(1e-2).weight_decay(0.01));
  ss::OffloadEngine engine(*model, ss::Options(device).offload("mlp").min_bytes(64 << 10));

  const auto batch = [&] {
    const at::Tensor x = at::randn({rows, width}).to(device);
    return ss::Tensors{x, x.cos()};
  };
  // Two microbatches: their gradients add up before the update.
  const ss::GraphedStep step =
      ss::make_graphed_step(engine,
                            ss::Callable(
                                "step", [](ModelImpl& m, const ss::Tensors& inputs) { return m.loss(inputs); }, model),
                            {batch(), batch()}, ss::StepOptions().update([&] {
                              ss::clip_grad_norm_(model->parameters(), 1.0);
                              optimizer.step();
                            }));

  for (int64_t i = 0; i < steps; ++i) {
    optimizer.set_lr(1e-2 * 0.5 * (1 + std::cos(3.14159 * static_cast<double>(i) / steps)));  // no new capture
    const std::vector<ss::Tensors> outputs = step({batch(), batch()});
    if (i % 5 == 4) {
      std::cout << "step " << i + 1 << "  loss " << outputs[0][0].item<float>() << '\n';
    }
  }
  std::cout << step.offloaded_bytes() << " bytes are offloaded and reloaded inside of each step's graph\n";
}
