#include "sidestream/graphed_step.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include "graphs/calls/call_set.h"
#include "graphs/engine/engine_access.h"
#include "graphs/guards/call_spec.h"
#include "graphs/guards/input_facts.h"
#include "graphs/whole_step/whole_step_body.h"
#include "sidestream/detail/call_buffers.h"
#include "sidestream/detail/call_request.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// The inputs of all microbatches, and as the shape of the call how many each has.
void flatten(const std::vector<Tensors>& microbatches, const detail::LentBuffers& into) {
  for (const Tensors& inputs : microbatches) {
    into->inputs.append(inputs.begin(), inputs.end());
    into->shape.push_back(inputs.size());
  }
}

}  // namespace

/// The state that copies of a GraphedStep share.
class GraphedStep::Shared {
 public:
  Shared(OffloadEngine engine, std::shared_ptr<const WholeStepBody::Given> given, std::shared_ptr<CallSet> set)
      : engine_(std::move(engine)), given_(std::move(given)), set_(std::move(set)) {}

  /// `inputs`: of all microbatches. `counts`: how many each has. Throws: as make_graphed_step.
  void capture(c10::ArrayRef<at::Tensor> inputs, c10::ArrayRef<std::size_t> counts);
  std::vector<Tensors> run(const std::vector<Tensors>& microbatches);
  void reset();
  void check_inputs(const std::vector<Tensors>& microbatches) const;
  [[nodiscard]] const std::string& name() const noexcept { return given_->name; }
  [[nodiscard]] std::size_t captures() const noexcept { return bodies_.size(); }
  [[nodiscard]] std::uint64_t offloaded_bytes() const {
    return bodies_.empty() ? 0 : bodies_.back()->copies().offloaded_bytes;
  }

 private:
  /// One call.
  struct Call {
    c10::ArrayRef<at::Tensor> inputs;
    const CallVariant* variant = nullptr;
    WholeStepBody* body = nullptr;
    mutable bool eager = false;  ///< it ran instead of a replay

    [[nodiscard]] const GraphSequence& sequence() const { return *variant->holder->sequence; }
    /// What was captured: it runs `body`.
    [[nodiscard]] const Body& function() const { return sequence().captured().calls.front().spec.body; }
  };

  /// Captures if no variant accepts the inputs.
  [[nodiscard]] const CallVariant& variant_for(const detail::CallRequest& request);
  [[nodiscard]] VariantTable& variants() const noexcept { return set_->sites.front().variants; }

  OffloadEngine engine_;
  std::shared_ptr<const WholeStepBody::Given> given_;
  std::vector<std::shared_ptr<WholeStepBody>> bodies_;  ///< by variant
  std::shared_ptr<CallSet> set_;                        ///< of one call; null after `reset`
};

void GraphedStep::Shared::check_inputs(const std::vector<Tensors>& microbatches) const {
  if (!at::GradMode::is_enabled() || c10::InferenceMode::is_enabled()) {
    throw UsageError("graphed step \"" + name() +
                     "\": it was called under no_grad or in inference mode, but it computes gradients; call it outside "
                     "of that mode");
  }
  for (const Tensors& inputs : microbatches) {
    if (std::any_of(inputs.begin(), inputs.end(), is_sparse_or_nested)) {
      refuse_composite_inputs("graphed step \"" + name() + "\"", inputs);
    }
    for (const at::Tensor& input : inputs) {
      if (input.defined() && input.requires_grad()) {
        throw UsageError("graphed step \"" + name() +
                         "\": an input requires a gradient, but a whole step computes gradients of parameters only; "
                         "detach the input");
      }
    }
  }
}

void GraphedStep::Shared::capture(c10::ArrayRef<at::Tensor> inputs, c10::ArrayRef<std::size_t> counts) {
  EngineState& state = EngineAccess::state(engine_);
  auto body = std::make_shared<WholeStepBody>(state.resources(), given_, counts.vec());
  body->refuse_hooks();
  Callable callable(given_->name, owning([body](torch::nn::Module&, const Tensors& given) { return body->run(given); }),
                    given_->module);
  callable.generators(given_->generators);
  const EngineAccess::Samples samples{std::vector<Sample>(inputs.begin(), inputs.end())};
  EngineAccess::capture(state, *set_, {std::move(callable)}, samples, counts.vec());
  bodies_.push_back(std::move(body));
}

const CallVariant& GraphedStep::Shared::variant_for(const detail::CallRequest& request) {
  if (const CallVariant* const variant = variants().find(request)) {
    return *variant;
  }
  const CallRules& rules = set_->sites.front().rules;
  if (!variants().has_room(/*gradients=*/true, 1, rules)) {
    throw UsageError(
        "graphed step \"" + name() +
        "\": it was called with another number of microbatches, or with inputs of other shapes, dtypes or devices "
        "than captured. Pass inputs like the samples, or raise StepOptions::max_captures (" +
        std::to_string(rules.max_captures) + ")");
  }
  capture(request.inputs, request.shape);
  return variants().all.back();
}

std::vector<Tensors> GraphedStep::Shared::run(const std::vector<Tensors>& microbatches) {
  if (set_ == nullptr) {
    throw UsageError("graphed step \"" + name() +
                     "\": it was called after GraphedStep::reset; make it again with make_graphed_step");
  }
  check_inputs(microbatches);
  const detail::LentBuffers buffers;
  flatten(microbatches, buffers);
  Call call{buffers->inputs};
  detail::CallRequest request;
  request.inputs = buffers->inputs;
  request.shape = buffers->shape;
  request.context = &call;
  request.run = [](const void* context, detail::TensorBuffer& outputs) {
    const auto& held = *static_cast<const Call*>(context);
    held.eager = true;
    held.function()(held.inputs.data(), outputs);
  };
  request.keep = [](const void* context) {
    detail::KeptCall kept;
    kept.body = static_cast<const Call*>(context)->function();
    return kept;
  };
  request.prepare = [](const void* context) { static_cast<const Call*>(context)->body->prepare(); };
  call.variant = &variant_for(request);
  call.body = bodies_[static_cast<std::size_t>(call.variant - variants().all.data())].get();
  EngineResources& resources = EngineAccess::state(engine_).resources();
  resources.owned_gradients.follow_latest_step(*resources.runtime);
  try {
    EngineAccess::state(engine_).dispatch(set_->sites.front(), request, buffers->outputs);
  } catch (...) {
    if (!call.sequence().captured().calls.front().forward.graph) {  // a capture in its place has failed
      call.body->abandon_capture();
    }
    throw;
  }
  if (!call.eager) {
    EngineAccess::state(engine_).copied_in_graph(call.body->copies());
  }
  call.body->attach_gradients(call.eager);
  std::vector<Tensors> outputs;
  auto next = buffers->outputs.begin();
  for (const std::size_t count : call.body->output_counts(call.eager)) {
    outputs.emplace_back(next, next + static_cast<std::ptrdiff_t>(count));
    next += static_cast<std::ptrdiff_t>(count);
  }
  return outputs;
}

void GraphedStep::Shared::reset() {
  if (set_ != nullptr) {
    variants().release_graphs();
    bodies_.clear();
    set_.reset();
  }
}

GraphedStep::Shared& GraphedStep::shared() const {
  if (shared_ == nullptr) {
    throw UsageError("this GraphedStep was moved from; use the one that it was moved to");
  }
  return *shared_;
}

std::vector<Tensors> GraphedStep::operator()(const std::vector<Tensors>& microbatches) const {
  return shared().run(microbatches);
}

const std::string& GraphedStep::name() const { return shared().name(); }

std::size_t GraphedStep::captures() const { return shared().captures(); }

std::uint64_t GraphedStep::offloaded_bytes() const { return shared().offloaded_bytes(); }

void GraphedStep::reset() { shared().reset(); }

GraphedStep EngineAccess::capture_whole_step(const OffloadEngine& engine, Callable step,
                                             const std::vector<Tensors>& samples, const StepOptions& options) {
  if (samples.empty()) {
    throw UsageError("make_graphed_step: no samples were given; pass the inputs of each microbatch, at least of one");
  }
  if (options.graph().retain_graph_in_backward() || options.graph().allow_unused_input() ||
      options.graph().forward_only() || !options.graph().gradients().empty() || !options.graph().order().empty()) {
    throw UsageError(
        "make_graphed_step: StepOptions::graph sets retain_graph_in_backward, gradients, "
        "order, forward_only or allow_unused_input. These work only for calls whose backward is a graph of its own; "
        "leave them out, and see StepOptions::accumulate");
  }
  if (options.graph().pool() != nullptr) {
    throw UsageError(
        "make_graphed_step: StepOptions::graph sets pool, but a step's graph has memory of its own; set pool only for "
        "make_graphed_callables or in the engine's GraphOptions");
  }
  if (!step.input_names().empty() || step.capture_time_hooks() != nullptr) {
    throw UsageError("make_graphed_step: the callable \"" + step.name() +
                     "\" has input names or capture-time hooks, which work only with make_graphed_callables. Pass a "
                     "step's inputs in order, and use the hooks around the warm-up in GraphOptions");
  }
  if (options.max_captures() < 1) {
    throw UsageError("make_graphed_step: StepOptions::max_captures is " + std::to_string(options.max_captures()) +
                     "; it must be at least 1");
  }
  auto given = std::make_shared<WholeStepBody::Given>();
  given->name = step.name();
  given->function = step.function();
  given->module =
      step.module() != nullptr ? step.module() : std::const_pointer_cast<torch::nn::Module>(engine.state().model());
  given->generators = step.generators();
  given->update = options.update();
  given->accumulate = options.accumulate();
  given->offload = options.offload();
  const std::shared_ptr<CallSet> set = make_set(engine.state(), {step}, options.graph());
  set->sites.front().rules.max_captures = options.max_captures();
  auto shared = std::make_shared<GraphedStep::Shared>(handle(engine), std::move(given), set);
  shared->check_inputs(samples);
  const detail::LentBuffers buffers;
  flatten(samples, buffers);
  shared->capture(buffers->inputs, buffers->shape);
  return GraphedStep(std::move(shared));
}

GraphedStep make_graphed_step(OffloadEngine& engine, Callable step, const std::vector<Tensors>& samples,
                              const StepOptions& options) {
  return EngineAccess::capture_whole_step(engine, std::move(step), samples, options);
}

}  // namespace sidestream
