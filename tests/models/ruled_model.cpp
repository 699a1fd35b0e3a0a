#include "models/ruled_model.h"

#include <utility>

#include <ATen/Functions.h>

#include "sidestream/call.h"

namespace sidestream::testing_model {

RuledLayer::RuledLayer(Rule rule) : rule_(std::move(rule)) {
  weight = register_parameter("weight", at::ones({kWidth}));
  extra = register_parameter("extra", at::ones({kWidth}));
  running = register_buffer("running", at::zeros({kWidth}));
}

at::Tensor RuledLayer::forward(at::Tensor x) {
  ++calls;
  if (!unregistered.defined()) {
    unregistered = at::zeros({kWidth}, x.options().requires_grad(false));
  }
  return rule_(*this, x);
}

RuledModel::RuledModel(std::int64_t count, const RuledLayer::Rule& rule, c10::Device device) {
  scale_ = register_parameter("scale", at::ones({1}));
  for (std::int64_t i = 0; i < count; ++i) {
    layers->push_back(std::make_shared<RuledLayer>(rule));
  }
  register_module("layers", layers);
  to(device);
}

RuledLayer& RuledModel::layer(std::int64_t index) { return *layers->ptr<RuledLayer>(static_cast<std::size_t>(index)); }

at::Tensor RuledModel::forward(const at::Tensor& x) {
  at::Tensor h = x * scale_;
  for (auto& layer : *layers) {
    h = call(layer->as<RuledLayer>(), h);
  }
  return h;
}

}  // namespace sidestream::testing_model
