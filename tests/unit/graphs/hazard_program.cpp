#include "unit/graphs/hazard_program.h"

#include <algorithm>
#include <utility>

#include <ATen/Functions.h>

#include "expect_throws.h"
#include "graphs/engine/engine_access.h"
#include "sidestream/error.h"
#include "sidestream/scope.h"
#include "unit/graphs/recorded_steps.h"

namespace sidestream::testing_model {

HazardProgram::HazardProgram(const Runtimes& runtimes, HazardForm form)
    : EngineProgram(runtimes), form_(std::move(form)), stream_(runtime().create_stream()) {
  calls_ = form_.bodies(weight_);
  if (!make_engine(nothing_, Options(device()).offload("**").min_bytes(256))) {
    return;
  }
  GraphOptions options;
  if (form_.on_stream) {
    options.cuda_graph_stream(stream_);
  }
  const std::size_t length = calls_.size() / form_.sequences;
  for (std::size_t begin = 0; begin < calls_.size(); begin += length) {
    std::vector<Callable> callables;
    for (std::size_t i = begin; i < begin + length; ++i) {
      callables.emplace_back("call." + std::to_string(i), owning(calls_[i]));
    }
    capture_linked(callables, options);
  }
  std::copy(layers_.begin(), layers_.end(), calls_.begin());
}

HazardProgram::~HazardProgram() {
  calls_.clear();
  end();
}

std::vector<at::Tensor> HazardProgram::step(std::int64_t s) {
  weight_.mutable_grad() = at::Tensor();
  std::vector<at::Tensor> results = form_.step(calls_, s, device());
  if (weight_.grad().defined()) {
    results.push_back(weight_.grad().clone());
  }
  return results;
}

TensorFunction exponentiates(const at::Tensor& weight) {
  return [weight](const Tensors& in) {
    at::Tensor h;
    {
      const OffloadScope scope("saves");
      h = (in[0] * weight).tanh().exp();
    }
    return Tensors{h * 0.5};
  };
}

Calls several(const at::Tensor& weight, std::size_t count) { return Calls(count, exponentiates(weight)); }

at::Tensor run_all(const Calls& calls, at::Tensor h) {
  for (const TensorFunction& call : calls) {
    h = call({h})[0];
  }
  return h;
}

void HazardTest::expect_right_in_every_order(const HazardForm& form) {
  const NamedProgram named{"hazard " + form.name,
                           [&](const Runtimes& runtimes) { return std::make_unique<HazardProgram>(runtimes, form); }};
  const auto& expected = plain_gradients(named, device_);
  const auto runtime = make_runtime(device_);
  const auto program = named.make({runtime, runtime});
  RecordedSteps steps(*program);
  const auto wrong = steps.first_wrong(expected, 60);
  EXPECT_EQ(wrong.schedule, "") << wrong.bytes << " bytes differ";
  EXPECT_GT(program->engine()->report().pinned_bytes, 0);
}

void HazardTest::expect_usable(const TensorFunction& body) {
  const auto gradient = [&](const TensorFunction& function) {
    const at::Tensor x = rows(5, device_).requires_grad_(true);
    function({x})[0].sum().backward();
    return x.grad();
  };
  const at::Tensor expected = gradient(body);
  torch::nn::Module nothing;
  OffloadEngine engine(nothing, Options(device_).offload("**").min_bytes(256));
  const auto graphed =
      make_graphed_callables(engine, {Callable("good", owning(body))}, {{rows(0, device_).requires_grad_(true)}});
  EXPECT_TRUE(at::equal(gradient(graphed[0]), expected));
}

std::string HazardTest::refusal_of(const Calls& bodies, const std::shared_ptr<Runtime>& runtime) const {
  torch::nn::Module nothing;
  OffloadEngine engine(EngineAccess::engine(nothing, Options(device_).offload("**").min_bytes(256), runtime));
  std::vector<Callable> callables;
  std::vector<std::vector<Sample>> samples;
  for (std::size_t i = 0; i < bodies.size(); ++i) {
    callables.emplace_back("call." + std::to_string(i), owning(bodies[i]));
    samples.push_back({rows(0, device_).requires_grad_(true)});
  }
  return message_of<CaptureError>([&] { (void)make_graphed_callables(engine, callables, samples); });
}

}  // namespace sidestream::testing_model
