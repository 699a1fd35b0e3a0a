#include "models/layer_stack.h"

#include <string>
#include <utility>

#include <ATen/Functions.h>
#include <torch/utils.h>

#include "sidestream/engine.h"
#include "sidestream/scope.h"

namespace sidestream::testing_model {

Mlp::Mlp(std::int64_t hidden, const Extras& extras) : extras_(extras) {
  norm_ = register_parameter("norm", at::ones({hidden}));
  fc1_ = register_parameter("fc1", at::randn({4 * hidden, hidden}) * 0.1);
  fc2_ = register_parameter("fc2", at::randn({hidden, 4 * hidden}) * 0.1);
  if (extras_.batch_norm) {
    mean_ = register_buffer("mean", at::zeros({4 * hidden}));
    variance_ = register_buffer("variance", at::ones({4 * hidden}));
    scale_ = register_parameter("scale", at::ones({4 * hidden}));
    shift_ = register_parameter("shift", at::zeros({4 * hidden}));
  }
}

at::Tensor Mlp::forward(at::Tensor h) {
  at::Tensor x;
  {
    const OffloadScope scope("norm");
    x = at::rms_norm(h, {h.size(-1)}, norm_, 1e-5);
  }
  {
    const OffloadScope scope("fc1");
    x = at::linear(x, fc1_);
    if (extras_.batch_norm) {
      x = at::batch_norm(x, scale_, shift_, named_buffers()["mean"], named_buffers()["variance"], is_training(), 0.1,
                         1e-5,
                         /*cudnn_enabled=*/false);
    }
  }
  {
    const OffloadScope scope("act");
    if (extras_.marked_activation) {
      mark_not_offload(x);
    }
    x = at::gelu(x);
  }
  const OffloadScope scope("fc2");
  return h + at::dropout(at::linear(x, fc2_), extras_.dropout, is_training());
}

torch::nn::Sequential layer_stack(std::int64_t layers, c10::Device device, const Mlp::Extras& extras) {
  torch::manual_seed(17);
  torch::nn::Sequential model;
  for (std::int64_t i = 0; i < layers; ++i) {
    model->push_back(std::make_shared<Mlp>(kHidden, extras));
  }
  model->to(device);
  return model;
}

at::Tensor rows(std::int64_t step, c10::Device device, std::int64_t salt) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(500 + 100 * salt + step));
  return at::randn({16, kHidden}, generator).to(device);
}

std::vector<GraphedCallable> graph_stack(OffloadEngine& engine, const torch::nn::Sequential& model, c10::Device device,
                                         const GraphOptions& options,
                                         const std::function<bool(std::int64_t layer)>& own) {
  std::vector<Callable> callables;
  std::vector<std::vector<Sample>> samples;
  for (const torch::nn::AnyModule& layer : *model) {
    const auto i = static_cast<std::int64_t>(callables.size());
    samples.push_back(
        {i > 0 && !own(i) ? Sample::output_of(i - 1) : Sample(rows(900 + i, device).requires_grad_(true))});
    callables.emplace_back("layers." + std::to_string(i), layer);
  }
  return make_graphed_callables(engine, std::move(callables), samples, options);
}

std::vector<GraphedCallable> graph_stack(OffloadEngine& engine, const torch::nn::Sequential& model, c10::Device device,
                                         const GraphOptions& options, bool linked) {
  return graph_stack(engine, model, device, options, [linked](std::int64_t /*layer*/) { return !linked; });
}

at::Tensor run_stack(const std::vector<GraphedCallable>& layers, at::Tensor h) {
  for (const GraphedCallable& layer : layers) {
    h = layer({h})[0];
  }
  return h;
}

}  // namespace sidestream::testing_model
