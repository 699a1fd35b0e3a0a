// make_graphed_callables: layers captured before training, for a trainer that calls them itself. It is the form of
// TransformerEngine's function of that name; ss::call (see ../minimal) needs less and is the usual way.
//
//   graphed_callables [auto|cuda|cuda:N|sim]
#include <iostream>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <sidestream/sidestream.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

namespace ss = sidestream;

struct LayerImpl : torch::nn::Module {
  explicit LayerImpl(int64_t width) : up(width, 4 * width), down(4 * width, width) {
    register_module("up", up);
    register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) {
    ss::OffloadScope scope("mlp");
    return x + down(at::gelu(up(x)));
  }
  torch::nn::Linear up, down;
};
TORCH_MODULE(Layer);

int main(int argc, char** argv) {
  const c10::Device device = ss::find_device(argc > 1 ? argv[1] : "auto");
  const int64_t rows = 1024, width = 64;
  torch::nn::Sequential model;
  for (int i = 0; i < 6; ++i) {
    model->push_back(Layer(width));
  }
  model->to(device);
  torch::optim::SGD optimizer(model->parameters(), /*lr=*/0.05);

  // The engine's options say what is offloaded: a callable's name, then the scope's.
  ss::OffloadEngine engine(*model, ss::Options(device).offload("*.mlp").min_bytes(64 << 10));

  // A callable for each layer, and for each callable its arguments. The first layer gets a tensor. Each other layer gets the
  // output of the callable before it, and reads it where that callable wrote it: nothing is copied.
  std::vector<ss::Callable> callables;
  std::vector<std::vector<ss::Sample>> samples;
  for (const torch::nn::AnyModule& layer : *model) {
    const auto i = static_cast<int64_t>(callables.size());
    callables.emplace_back("layer" + std::to_string(i), layer);
    samples.push_back({i == 0 ? ss::Sample(at::randn({rows, width}).to(device)) : ss::Sample::output_of(i - 1)});
  }
  const std::vector<ss::GraphedCallable> layers =
      ss::make_graphed_callables(engine, callables, samples, ss::GraphOptions().num_warmup_iters(2));

  for (int i = 0; i < 20; ++i) {
    const at::Tensor x = at::randn({rows, width}).to(device);
    auto step = engine.step();  // the report counts steps; replays need none
    at::Tensor h = x;
    for (const ss::GraphedCallable& layer : layers) {
      h = layer({h})[0];
    }
    const at::Tensor loss = (h - x.cos()).square().mean();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    if (i % 5 == 4) {
      std::cout << "step " << i + 1 << "  loss " << loss.item<float>() << '\n';
    }
  }
  engine.report().print(std::cout);
}
