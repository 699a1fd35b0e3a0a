#include "sidestream/graphed_callable.h"

#include <algorithm>
#include <utility>

#include <c10/util/irange.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>

#include "graphs/engine/engine_access.h"
#include "graphs/resources/engine_resources.h"
#include "graphs/sequence/sequence_streams.h"
#include "sidestream/detail/call_buffers.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// "x", "mask"
std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) {
    text += (text.empty() ? "\"" : ", \"") + name + "\"";
  }
  return text;
}

}  // namespace

/// What copies of a GraphedCallable share.
class GraphedCallable::Shared {
 public:
  Shared(std::shared_ptr<EngineState> engine, std::shared_ptr<CallSite> site, Callable callable)
      : engine_(std::move(engine)), site_(std::move(site)), callable_(std::move(callable)) {}

  Tensors run(const Tensors& inputs, const ReplayOptions* options = nullptr) {
    if (options != nullptr) {
      check(*options);
    }
    const Call call{callable_.function(), inputs};
    detail::CallRequest request;
    request.inputs = inputs;
    request.context = &call;
    request.replay = options;
    request.run = [](const void* context, detail::TensorBuffer& outputs) {
      const auto& held = *static_cast<const Call*>(context);
      const Tensors made = held.function(held.inputs);
      outputs.append(made.begin(), made.end());
    };
    request.keep = [](const void* context) {
      const auto& held = *static_cast<const Call*>(context);
      detail::KeptCall kept;
      kept.body = [function = held.function, count = held.inputs.size()](const at::Tensor* given,
                                                                         detail::TensorBuffer& outputs) {
        const Tensors made = function(Tensors(given, given + count));
        outputs.append(made.begin(), made.end());
      };
      return kept;
    };
    const detail::LentBuffers buffers;
    engine_->dispatch(*site_, request, buffers->outputs);
    return Tensors(buffers->outputs.begin(), buffers->outputs.end());
  }

  /// What is named, in the order of the capture.
  [[nodiscard]] Tensors in_order(c10::ArrayRef<NamedInput> given) const {
    const std::vector<std::string>& names = callable_.input_names();
    if (names.empty()) {
      throw UsageError(
          describe() +
          ": called with named inputs, but its inputs have no names; give them with Callable::input_names, "
          "or pass the tensors in order");
    }
    Tensors inputs(names.size());
    std::vector<bool> found(names.size());
    for (const NamedInput& input : given) {
      const auto name = std::find(names.begin(), names.end(), input.name);
      if (name == names.end()) {
        throw UsageError(describe() + ": has no input \"" + std::string(input.name) + "\"; its inputs are " +
                         listed(names));
      }
      const auto index = static_cast<std::size_t>(name - names.begin());
      if (found[index]) {
        throw UsageError(describe() + ": input \"" + *name + "\" is given twice; give each of its inputs once");
      }
      found[index] = true;
      inputs[index] = input.tensor;
    }
    for (const auto i : c10::irange(names.size())) {
      if (!found[i]) {
        throw UsageError(describe() + ": input \"" + names[i] + "\" is missing; give each of its inputs by name: " +
                         listed(names) + " (an undefined tensor if it was undefined at the capture)");
      }
    }
    return inputs;
  }

  void reset() {
    if (!std::exchange(site_->dropped, true)) {
      site_->variants.release_graphs();
      if (site_->set != nullptr) {
        site_->set->pass.clear();  // it can never be whole
      }
    }
  }

  void backward_dw() {
    const auto is_mine = [this](const GraphSequence& sequence, std::size_t call) {
      return std::any_of(site_->variants.all.begin(), site_->variants.all.end(), [&](const CallVariant& variant) {
        return variant.holder->sequence.get() == &sequence && variant.index() == call;
      });
    };
    if (engine_->resources().delayed_weights->compute_next(is_mine)) {
      return;
    }
    if (site_->eager_runs_without_dw > 0) {  // an eager backward has computed all gradients
      --site_->eager_runs_without_dw;
      return;
    }
    throw UsageError(
        describe() +
        ": backward_dw was called, but no weight gradients are delayed: its backward did not run since its latest "
        "forward, failed or named inputs; backward_dw ran after it already; the callable is called in the body of a "
        "graphed call; or no parameter with GradientPolicy::delayed required a gradient at the capture. Call it once "
        "after each backward of its own");
  }

  [[nodiscard]] const std::string& name() const noexcept { return callable_.name(); }

 private:
  struct Call {
    const TensorFunction& function;
    const Tensors& inputs;
  };

  void check(const ReplayOptions& options) const {
    const c10::Device device = engine_->runtime().device();
    if (options.stream() && options.stream()->device() != device) {
      throw UsageError(describe() + ": ReplayOptions::stream is on " + options.stream()->device().str() +
                       ", its graphs are on " + device.str() + "; give a stream of that device");
    }
    if (options.event() != nullptr && GraphEventState::device_of(*options.event()) != device) {
      throw UsageError(describe() + ": ReplayOptions::event is of " +
                       GraphEventState::device_of(*options.event()).str() + ", its graphs are on " + device.str() +
                       "; make the event for that device");
    }
  }

  [[nodiscard]] std::string describe() const { return "graphed call \"" + callable_.name() + "\""; }

  std::shared_ptr<EngineState> engine_;
  std::shared_ptr<CallSite> site_;  ///< keeps its CallSet
  Callable callable_;
};

Callable::Callable(std::string name, torch::nn::AnyModule module)
    : name_(std::move(name)), module_(module.is_empty() ? nullptr : module.ptr()) {
  function_ = [held = std::make_shared<torch::nn::AnyModule>(std::move(module))](const Tensors& inputs) -> Tensors {
    if (inputs.size() != 1) {
      throw UsageError("a Callable made from an AnyModule takes one tensor, but was given " +
                       std::to_string(inputs.size()) + "; to pass more, make the Callable from a function");
    }
    return {held->forward(inputs[0])};
  };
  check_not_null(/*with_module=*/true);
}

Callable& Callable::input_names(std::vector<std::string> names) {
  for (const auto i : c10::irange(names.size())) {
    if (names[i].empty()) {
      throw UsageError("callable \"" + name_ + "\": the name of its input " + std::to_string(i) +
                       " is empty; name all inputs, or none");
    }
    if (std::find(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(i), names[i]) !=
        names.begin() + static_cast<std::ptrdiff_t>(i)) {
      throw UsageError("callable \"" + name_ + "\": two of its inputs are named \"" + names[i] +
                       "\"; give each a name of its own");
    }
  }
  input_names_ = std::move(names);
  return *this;
}

Callable& Callable::capture_time_hooks(CaptureTimeHooks hooks) {
  hooks_ = std::make_shared<const CaptureTimeHooks>(std::move(hooks));
  return *this;
}

Callable& Callable::generators(std::vector<at::Generator> generators) {
  generators_ = std::move(generators);
  return *this;
}

void Callable::check_not_null(bool with_module) const {
  if (name_.empty()) {
    throw UsageError("a Callable was given an empty name, but reports and errors name it; pass a name");
  }
  if (with_module && module_ == nullptr) {
    throw UsageError("callable \"" + name_ +
                     "\": its module is null (or its holder empty); make the module first, or leave the argument out");
  }
  if (function_ == nullptr) {
    throw UsageError("callable \"" + name_ + "\": its function is null; pass a function");
  }
}

Sample Sample::output_of(std::int64_t callable, std::int64_t output) {
  if (callable < 0 || output < 0) {
    throw UsageError("Sample::output_of(" + std::to_string(callable) + ", " + std::to_string(output) +
                     "): callables and their outputs count from 0");
  }
  Sample sample{at::Tensor()};
  sample.callable_ = callable;
  sample.output_ = output;
  return sample;
}

GraphedCallable::Shared& GraphedCallable::shared() const {
  if (shared_ == nullptr) {
    throw UsageError("this GraphedCallable was moved from; use the one that it was moved to");
  }
  return *shared_;
}

Tensors GraphedCallable::operator()(const Tensors& inputs) const { return shared().run(inputs); }

Tensors GraphedCallable::operator()(const Tensors& inputs, const ReplayOptions& options) const {
  return shared().run(inputs, &options);
}

Tensors GraphedCallable::call(c10::ArrayRef<NamedInput> inputs) const {
  Shared& callable = shared();
  return callable.run(callable.in_order(inputs));
}

Tensors GraphedCallable::call(c10::ArrayRef<NamedInput> inputs, const ReplayOptions& options) const {
  Shared& callable = shared();
  return callable.run(callable.in_order(inputs), &options);
}

const std::string& GraphedCallable::name() const { return shared().name(); }

void GraphedCallable::reset() { shared().reset(); }

void GraphedCallable::backward_dw() const { shared().backward_dw(); }

std::vector<CallSpec> EngineAccess::specs_of(EngineState& state, const std::vector<Callable>& callables,
                                             const Samples& samples, const GraphOptions& options) {
  if (callables.empty() || callables.size() != samples.size()) {
    throw UsageError("make_graphed_callables: " + std::to_string(callables.size()) + " callables and " +
                     std::to_string(samples.size()) +
                     " lists of samples were given; pass one list for each callable, and at least one callable");
  }
  std::vector<CallSpec> specs;
  for (std::size_t i = 0; i < callables.size(); ++i) {
    CallSpec spec;
    spec.name = callables[i].name();
    spec.scope = state.tree().child(state.tree().root(), spec.name);
    const std::size_t count = samples[i].size();
    spec.body = [function = callables[i].function(), count](const at::Tensor* inputs, detail::TensorBuffer& outputs) {
      const Tensors made = function(Tensors(inputs, inputs + count));
      outputs.append(made.begin(), made.end());
    };
    if (const auto& names = callables[i].input_names(); !names.empty() && names.size() != count) {
      throw UsageError("make_graphed_callables: callable \"" + spec.name + "\" names " + std::to_string(names.size()) +
                       " inputs (" + listed(names) + "), but has " + std::to_string(count) +
                       " samples; give one sample for each name");
    }
    spec.module = callables[i].module();
    spec.hooks = callables[i].capture_time_hooks();
    spec.generators = callables[i].generators();
    const auto watched = spec.module != nullptr ? spec.module : state.model();
    const std::string described = "graphed call \"" + spec.name + "\"";
    Tensors given;
    for (const Sample& sample : samples[i]) {
      given.push_back(sample.tensor());
    }
    refuse_composite_inputs(described, given);
    refuse_nested_members(described, *watched);
    spec.state = CallState::current(state.runtime().device().type(), watched);
    spec.state.modes.gradients = !options.forward_only();
    for (const Sample& sample : samples[i]) {
      if (sample.callable() >= static_cast<std::int64_t>(i)) {
        throw UsageError("make_graphed_callables: callable \"" + spec.name + "\" takes the output of callable " +
                         std::to_string(sample.callable()) +
                         ", which does not come before it in the list; list the callable that gives the output first "
                         "(callables count from 0)");
      }
      CallInput& input = spec.inputs.emplace_back();
      if (sample.callable() < 0) {
        const bool alone = sample.tensor().defined() && !spec.state.modes.gradients;
        input.sample = alone ? sample.tensor().detach() : sample.tensor();
        input.shared_cast = input.sample.defined() && has_shared_cast(input.sample);
      } else {
        input.from = Link{static_cast<std::size_t>(sample.callable()), static_cast<std::size_t>(sample.output())};
      }
    }
    specs.push_back(std::move(spec));
  }
  if (!agree_to_capture(options)) {
    throw UsageError("\"" + callables.front().name() +
                     "\", and what is captured with it, cannot be captured: GraphOptions::agree_to_capture returned "
                     "false; try again when all ranks return true");
  }
  return specs;
}

std::shared_ptr<CallSet> EngineAccess::make_set(EngineState& state, const std::vector<Callable>& callables,
                                                const GraphOptions& options, const CallRules* rules) {
  const EngineResources& resources = state.resources();
  if (resources.options.device_budget()) {
    throw UsageError(
        "the engine has Options::device_budget, whose plan is made of what calls of ss::call save; make callables, "
        "buckets and graphed steps with an engine without it");
  }
  auto set = std::make_shared<CallSet>(
      callables.size(), options,
      RecordedCalls(resources.model, state.runtime().device(), resources.exclusions, resources.rest,
                    /*delays=*/false));
  if (!options.order().empty()) {
    set->order = std::make_unique<CallableOrder>(
        options.order(), callables, resources.options.call_options().max_captures(), delays_gradients(options));
  }
  for (const auto i : c10::irange(callables.size())) {
    CallSite& site = set->sites[i];
    site.order = set->order.get();
    site.kind = CallSite::Kind::callable;
    site.scope = state.tree().child(state.tree().root(), callables[i].name());
    site.module = callables[i].module();
    site.watched = site.module != nullptr ? site.module : state.model();
    site.hooks = callables[i].capture_time_hooks();
    site.generators = callables[i].generators();
    site.forwards_alone = options.forward_only();
    if (rules != nullptr) {
      site.set = set.get();
      site.rules = *rules;
    }
  }
  return set;
}

void EngineAccess::capture(EngineState& state, CallSet& set, const std::vector<Callable>& callables,
                           const Samples& samples, const std::vector<std::size_t>& shape) {
  const std::vector<CallSpec> specs = specs_of(state, callables, samples, set.options);
  const bool in_order = set.order != nullptr;
  set.add(state.sequences().capture(in_order ? set.order->specs_of(specs) : specs,
                                    in_order ? set.order->graphs() : nested_order(specs.size()), set.options),
          shape);
}

std::vector<GraphedCallable> EngineAccess::capture(const OffloadEngine& engine, const std::vector<Callable>& callables,
                                                   const std::vector<Samples>& buckets, const GraphOptions& options,
                                                   const CallRules* rules) {
  EngineState& state = engine.state();
  const auto set = make_set(state, callables, options, rules);
  for (const Samples& samples : buckets) {
    capture(state, *set, callables, samples);
  }
  std::vector<GraphedCallable> graphed;
  for (const auto i : c10::irange(callables.size())) {
    graphed.push_back(GraphedCallable(std::make_shared<GraphedCallable::Shared>(
        engine.state_, std::shared_ptr<CallSite>(set, &set->sites[i]), callables[i])));
  }
  return graphed;
}

std::vector<GraphedCallable> make_graphed_callables(OffloadEngine& engine, std::vector<Callable> callables,
                                                    const std::vector<std::vector<Sample>>& samples,
                                                    const GraphOptions& options) {
  return EngineAccess::capture(engine, callables, {samples}, options);
}

}  // namespace sidestream
