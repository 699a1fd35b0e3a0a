#include "models/stack_twins.h"

namespace sidestream::testing_model {

StackTwins::StackTwins(c10::Device on, std::int64_t count, const Mlp::Extras& extras)
    : device(on), model(layer_stack(count, on, extras)), plain(layer_stack(count, on, extras)) {
  engine.emplace(*model, Options(on).offload("layers.*.*").min_bytes(1024));
}

void StackTwins::capture(const GraphOptions& options, bool linked) {
  layers = graph_stack(*engine, model, device, options, linked);
}

void StackTwins::capture(const Options& engine_options, const GraphOptions& options, bool linked) {
  layers.clear();
  engine.emplace(*model, engine_options);
  capture(options, linked);
}

at::Tensor StackTwins::input(std::int64_t s) const { return rows(s, device).requires_grad_(true); }

at::Tensor StackTwins::run_layer(bool graphed, std::size_t i, const at::Tensor& h) const {
  return graphed ? layers[i]({h})[0] : plain.ptr()->at<Mlp>(i).forward(h);
}

at::Tensor StackTwins::forward(bool graphed, at::Tensor h) const {
  for (std::size_t i = 0; i < model->size(); ++i) {
    h = run_layer(graphed, i, h);
  }
  return h;
}

at::Tensor StackTwins::loss(bool graphed, const at::Tensor& x, std::int64_t s) const {
  return (forward(graphed, x) * rows(s, device, 1)).mean();
}

StepTensors StackTwins::step(bool graphed, std::int64_t s, const Layer& run, at::Tensor* output) {
  const at::Tensor x = input(s);
  at::Tensor y = x;
  StepTensors result = train_step(graphed ? *model : *plain, nullptr, [&] {
    for (std::size_t i = 0; i < model->size(); ++i) {
      y = graphed && run ? run(i, y) : run_layer(graphed, i, y);
    }
    (y * rows(s, device, 1)).mean().backward();
  });
  result.emplace_back("gradient of the input", x.grad());
  result.emplace_back("output", y);
  if (output != nullptr) {
    *output = y.detach();
  }
  return result;
}

at::Tensor StackTwins::expect_plain(std::int64_t s, const Layer& run) {
  const StepTensors expected = step(false, s);
  at::Tensor output;
  EXPECT_TRUE(same(step(true, s, run, &output), expected)) << "step " << s;
  return output;
}

void StackTwins::expect_plain(std::int64_t first, std::int64_t last) {
  for (std::int64_t s = first; s < last; ++s) {
    (void)expect_plain(s);
  }
}

}  // namespace sidestream::testing_model
