#include "unit/graphs/engine_program.h"

#include "graphs/engine/engine_access.h"

namespace sidestream::testing_model {

bool EngineProgram::make_engine(torch::nn::Module& model, const Options& options) {
  if (runtimes_.engine != nullptr) {
    engine_.emplace(EngineAccess::engine(model, options, runtimes_.engine));
  }
  return engine_.has_value();
}

void EngineProgram::capture_linked(const std::vector<Callable>& callables, const GraphOptions& options,
                                   const std::function<bool(std::size_t i)>& own) {
  std::vector<std::vector<Sample>> samples;
  for (std::size_t i = 0; i < callables.size(); ++i) {
    const auto number = static_cast<std::int64_t>(i);
    samples.push_back({i == 0 || (own && own(i)) ? Sample(rows_of(900 + number).requires_grad_(true))
                                                 : Sample::output_of(number - 1)});
  }
  for (GraphedCallable& layer : make_graphed_callables(*engine_, callables, samples, options)) {
    layers_.push_back(std::move(layer));
  }
}

void EngineProgram::end() {
  runtime().synchronize_device();
  layers_.clear();
  engine_.reset();
}

StackProgram::StackProgram(const Runtimes& runtimes, std::size_t layers)
    : EngineProgram(runtimes), model_(layer_stack(static_cast<std::int64_t>(layers), device())) {}

std::vector<Callable> StackProgram::callables(std::size_t first, std::size_t last) {
  std::vector<Callable> result;
  for (std::size_t i = first; i < last; ++i) {
    result.emplace_back("layers." + std::to_string(i), layer(i));
  }
  return result;
}

at::Tensor StackProgram::run(std::size_t first, std::size_t last, at::Tensor h) {
  for (std::size_t i = first; i < last; ++i) {
    h = layers_.empty() ? layer(i).forward(h) : layers_[i]({h})[0];
  }
  return h;
}

void StackProgram::add_gradients(std::vector<at::Tensor>& results) const {
  for (const at::Tensor& parameter : model_->parameters()) {
    if (parameter.grad().defined()) {
      results.push_back(parameter.grad());
    }
  }
}

}  // namespace sidestream::testing_model
