#include "sidestream/graphed_step.h"

#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/irange.h>

#include "graphs/engine/engine_access.h"
#include "graphs/whole_step/whole_step_body.h"
#include "sidestream/error.h"

namespace sidestream {

/// The state that copies of a GraphedStep share.
class GraphedStep::Shared {
 public:
  Shared(OffloadEngine engine, std::shared_ptr<const WholeStepBody::Given> given, StepOptions options)
      : engine_(std::move(engine)), given_(std::move(given)), options_(std::move(options)) {}

  /// Throws: as make_graphed_step.
  void capture(const std::vector<Tensors>& samples);
  std::vector<Tensors> run(const std::vector<Tensors>& microbatches);
  void reset();
  [[nodiscard]] const std::string& name() const noexcept { return given_->name; }
  [[nodiscard]] std::size_t captures() const noexcept { return variants_.size(); }
  [[nodiscard]] std::uint64_t offloaded_bytes() const {
    return variants_.empty() ? 0 : variants_.back().body->copies().offloaded_bytes;
  }

 private:
  /// One tensor of the inputs.
  struct Shape {
    std::vector<std::int64_t> sizes;
    at::ScalarType dtype;
    bool defined;
  };
  struct Variant {
    std::vector<std::size_t> counts;
    std::vector<Shape> shapes;
    std::shared_ptr<WholeStepBody> body;
    GraphedCallable graph;
    std::weak_ptr<const SequenceHolder> holder;  ///< of its graph

    /// No graph is left: a capture in its place has failed.
    [[nodiscard]] bool is_lost() const {
      const auto held = holder.lock();
      return held != nullptr && !held->sequence->calls().front().forward.graph;
    }
  };

  [[nodiscard]] static bool fits(const Variant& variant, const std::vector<Tensors>& microbatches);
  void check_inputs(const std::vector<Tensors>& microbatches) const;
  Variant& variant_for(const std::vector<Tensors>& microbatches);

  OffloadEngine engine_;
  std::shared_ptr<const WholeStepBody::Given> given_;
  StepOptions options_;
  std::vector<Variant> variants_;
  bool dropped_ = false;
};

void GraphedStep::Shared::check_inputs(const std::vector<Tensors>& microbatches) const {
  if (!at::GradMode::is_enabled() || c10::InferenceMode::is_enabled()) {
    throw UsageError("graphed step \"" + name() +
                     "\": it was called under no_grad or in inference mode, but it computes gradients; call it outside "
                     "of that mode");
  }
  for (const Tensors& inputs : microbatches) {
    for (const at::Tensor& input : inputs) {
      if (input.defined() && input.requires_grad()) {
        throw UsageError("graphed step \"" + name() +
                         "\": an input requires a gradient, but a whole step computes gradients of parameters only; "
                         "detach the input");
      }
    }
  }
}

bool GraphedStep::Shared::fits(const Variant& variant, const std::vector<Tensors>& microbatches) {
  if (variant.counts.size() != microbatches.size()) {
    return false;
  }
  auto shape = variant.shapes.begin();
  for (const auto m : c10::irange(microbatches.size())) {
    if (variant.counts[m] != microbatches[m].size()) {
      return false;
    }
    for (const at::Tensor& input : microbatches[m]) {
      const bool same =
          input.defined() ? shape->defined && input.sizes().equals(shape->sizes) && input.scalar_type() == shape->dtype
                          : !shape->defined;
      if (!same) {
        return false;
      }
      ++shape;
    }
  }
  return true;
}

void GraphedStep::Shared::capture(const std::vector<Tensors>& samples) {
  check_inputs(samples);
  std::vector<std::size_t> counts;
  std::vector<Shape> shapes;
  std::vector<Sample> flat;
  for (const Tensors& inputs : samples) {
    counts.push_back(inputs.size());
    for (const at::Tensor& input : inputs) {
      shapes.push_back(input.defined() ? Shape{input.sizes().vec(), input.scalar_type(), true}
                                       : Shape{{}, at::ScalarType::Undefined, false});
      flat.emplace_back(input);
    }
  }
  auto body = std::make_shared<WholeStepBody>(EngineAccess::state(engine_).resources(), given_, counts);
  body->refuse_hooks();
  Callable callable(given_->name,
                    owning([body](torch::nn::Module&, const Tensors& inputs) { return body->run(inputs); }),
                    given_->module);
  callable.generators(given_->generators);
  const EngineAccess::Samples of_step{flat};
  auto graphs = EngineAccess::capture(engine_, {std::move(callable)}, {&of_step}, options_.graph());
  variants_.push_back({std::move(counts), std::move(shapes), std::move(body), std::move(graphs.front()),
                       EngineAccess::state(engine_).sequences().all().back()});
}

GraphedStep::Shared::Variant& GraphedStep::Shared::variant_for(const std::vector<Tensors>& microbatches) {
  for (Variant& variant : variants_) {
    if (fits(variant, microbatches)) {
      return variant;
    }
  }
  if (static_cast<std::int64_t>(variants_.size()) >= options_.max_captures()) {
    throw UsageError("graphed step \"" + name() +
                     "\": it was called with another number of microbatches, or with inputs of other shapes or dtypes, "
                     "than captured. Pass inputs like the samples, or raise StepOptions::max_captures (" +
                     std::to_string(options_.max_captures()) + ")");
  }
  capture(microbatches);
  return variants_.back();
}

std::vector<Tensors> GraphedStep::Shared::run(const std::vector<Tensors>& microbatches) {
  if (dropped_) {
    throw UsageError("graphed step \"" + name() + "\": it was called after OffloadEngine::reset; make it again");
  }
  check_inputs(microbatches);
  Variant& variant = variant_for(microbatches);
  Tensors flat;
  for (const Tensors& inputs : microbatches) {
    flat.insert(flat.end(), inputs.begin(), inputs.end());
  }
  const auto [made, eagerly] = [&] {
    try {
      return EngineAccess::run(variant.graph, flat, [&body = *variant.body] { body.prepare(); });
    } catch (...) {
      if (variant.is_lost()) {
        variant.body->abandon_capture();
      }
      throw;
    }
  }();
  if (!eagerly) {
    EngineAccess::state(engine_).copied_in_graph(variant.body->copies());
  }
  variant.body->attach_gradients(eagerly);
  std::vector<Tensors> outputs;
  auto next = made.begin();
  for (const std::size_t count : variant.body->output_counts(eagerly)) {
    outputs.emplace_back(next, next + static_cast<std::ptrdiff_t>(count));
    next += static_cast<std::ptrdiff_t>(count);
  }
  return outputs;
}

void GraphedStep::Shared::reset() {
  for (Variant& variant : variants_) {
    variant.graph.reset();
  }
  variants_.clear();
  dropped_ = true;
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
      options.graph().forward_only() || !options.graph().gradients().empty()) {
    throw UsageError(
        "make_graphed_step: StepOptions::graph sets retain_graph_in_backward, gradients, "
        "forward_only or allow_unused_input. These work only for calls whose backward is a graph of its own; leave "
        "them out, and see StepOptions::accumulate");
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
  auto shared = std::make_shared<GraphedStep::Shared>(handle(engine), std::move(given), options);
  shared->capture(samples);
  return GraphedStep(std::move(shared));
}

GraphedStep make_graphed_step(OffloadEngine& engine, Callable step, const std::vector<Tensors>& samples,
                              const StepOptions& options) {
  return EngineAccess::capture_whole_step(engine, std::move(step), samples, options);
}

}  // namespace sidestream
