#include "graphs/capture/warmup.h"

#include <algorithm>
#include <cstdint>
#include <deque>
#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones_like.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include "base/site.h"
#include "graphs/capture/body_hooks.h"
#include "graphs/gradients/gradient_leaves.h"
#include "graphs/guards/call_spec.h"
#include "graphs/outputs/linked_outputs.h"
#include "graphs/outputs/storage_holders.h"
#include "graphs/sandbox/pass_watch.h"
#include "graphs/sandbox/sandbox.h"
#include "memory/storage_view.h"
#include "observe/operator_observer.h"
#include "offload/nested_backward.h"
#include "offload/saved_tensor_recorder.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// Times one eager pass of a call on the current stream, by the device's own clock.
class PassClock {
 public:
  /// `runtime` must outlive this object.
  explicit PassClock(Runtime& runtime)
      : runtime_(&runtime),
        begin_(runtime.create_event(EventTiming::on)),
        forward_end_(runtime.create_event(EventTiming::on)),
        turn_(runtime.create_event(EventTiming::on)),
        end_(runtime.create_event(EventTiming::on)) {}

  void forward_begins() { runtime_->record(begin_, runtime_->current_stream()); }
  void forward_ended() { runtime_->record(forward_end_, runtime_->current_stream()); }
  void backward_begins() { runtime_->record(turn_, runtime_->current_stream()); }
  void ended() { runtime_->record(end_, runtime_->current_stream()); }
  /// Of a pass that has ended. Blocks the host until the device has finished it.
  [[nodiscard]] LayerPace pace() {
    runtime_->synchronize(end_);
    constexpr double kMillisecond = 1e-3;
    return {runtime_->elapsed_ms(begin_, forward_end_) * kMillisecond,
            runtime_->elapsed_ms(turn_, end_) * kMillisecond};
  }

 private:
  Runtime* runtime_;
  Event begin_;
  Event forward_end_;
  Event turn_;
  Event end_;
};

std::vector<bool> flags_of(const std::vector<at::Tensor>& tensors) {
  std::vector<bool> flags;
  for (const at::Tensor& tensor : tensors) {
    flags.push_back(tensor.defined() && tensor.requires_grad());
  }
  return flags;
}

/// True if the body returns a leaf that is no input, or a view of one: a parameter. Autograd gives such leaves the gradients of these
/// outputs outside of the graphs. See captured_outputs.cpp.
bool returns_parameter(const at::Tensor& output, const std::vector<at::Tensor>& inputs) {
  const bool view = output.is_view();
  const at::TensorBase& base = view ? output._base() : output;
  const auto shares = [&](const at::Tensor& input) { return same_storage(input, base); };
  if (!base.is_leaf() || !base.has_storage() || std::any_of(inputs.begin(), inputs.end(), shares)) {
    return false;
  }
  // A function of the body computes its gradient, also if it returns a view.
  return !view || torch::autograd::impl::get_view_autograd_meta(output)->get_creation_meta() !=
                      torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION;
}

/// `outputs`: of the calls before this one.
std::vector<at::Tensor> leaves_of(const CallSpec& spec, const LinkedOutputs& outputs, c10::Device device) {
  std::vector<at::Tensor> leaves;
  for (const CallInput& input : spec.inputs) {
    if (const std::size_t index = leaves.size(); input.aliases && input.aliases->same_as != index) {
      leaves.push_back(leaves[input.aliases->same_as]);
      continue;
    }
    const at::Tensor source = input.from ? outputs.of(spec, *input.from) : sample_on(device, input);
    leaves.push_back(source.defined() ? source.detach().requires_grad_(source.requires_grad()) : source);
  }
  return leaves;
}

/// Refuses a body that seeds a generator that it draws from: a replay would not seed. Another thread may seed once meanwhile; that seed
/// stays in effect.
class SeedWatch {
 public:
  explicit SeedWatch(std::deque<RngStateGuard>& draws) : draws_(draws), seeded_(draws.size()) {}
  /// Call after each pass of `spec`'s body. `last`: no other pass follows.
  void check(const CallSpec& spec, bool last) {
    for (const auto i : c10::irange(draws_.size())) {
      if (!draws_[i].is_seeded()) {
        continue;
      }
      if (++seeded_[i] > 1 || last) {
        draws_[i].forget_seed();
        throw CaptureError(
            "graphed call \"" + spec.name + "\": it seeds " +
            (i == 0 ? "the device's generator" : "a generator that GraphOptions::generators or its callable names") +
            ", which a replay would not do. Or another thread seeds it again and again during the capture. Seed before "
            "the call, and before threads capture");
      }
      draws_[i].take_seed();
    }
  }

 private:
  std::deque<RngStateGuard>& draws_;
  std::vector<int> seeded_;
};

}  // namespace

void PassHooks::before_forward() const {
  if (hooks_ != nullptr) {
    run(hooks_->before_forward());
  }
}

void PassHooks::after_forward() const {
  if (hooks_ != nullptr) {
    run(hooks_->after_forward());
  }
}

void PassHooks::before_backward() const {
  if (hooks_ != nullptr) {
    run(hooks_->before_backward());
  }
}

void PassHooks::after_backward() const {
  if (hooks_ != nullptr) {
    run(hooks_->after_backward());
  }
}

void PassHooks::run(const std::function<void()>& hook) const {
  if (!hook) {
    return;
  }
  const auto meet = [this](c10::ArrayRef<at::Tensor> tensors) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.defined() && tensor.has_storage()) {
        met_.insert(tensor.storage());
      }
    }
  };
  const RecorderGuard no_recorder(nullptr);
  const OperatorObserverGuard observer([&](const OperatorAccess& access) {
    meet(access.reads);
    meet(access.outputs);
  });
  hook();
  observer.rethrow();
}

detail::TensorBuffer eager_pass(const CallSpec& spec, const std::vector<at::Tensor>& inputs,
                                const std::function<std::vector<at::Tensor>()>& wanted, const PassHooks& hooks,
                                std::vector<bool>* used, Runtime* runtime, LayerPace* pace,
                                const BackwardPass& backward) {
  std::optional<PassClock> clock;
  if (pace != nullptr) {
    clock.emplace(*runtime);
  }
  const std::vector<at::Tensor> known = wanted();
  Sandbox sandbox;
  sandbox.hide_gradients(known);
  std::vector<at::Tensor> hidden = known;
  if (const torch::nn::Module* const model = spec.state.modules.root(); spec.module == nullptr && model != nullptr) {
    const std::vector<at::Tensor> parameters =
        model->parameters();  // which of them a function reads, this pass finds out
    hidden.insert(hidden.end(), parameters.begin(), parameters.end());
  }
  sandbox.hide_hooks_and_accumulators(hidden);
  const NestedBackwardRefusal no_nested;
  detail::TensorBuffer outputs;
  hooks.before_forward();
  if (clock) {
    clock->forward_begins();
  }
  {
    const CallStateGuard state(spec.state, Direction::forward);
    const std::vector<at::Tensor> arguments = arguments_of(spec, inputs);
    const std::vector<bool> flags = flags_of(arguments);
    spec.body(arguments.data(), outputs);
    if (flags_of(arguments) != flags) {
      throw CaptureError("graphed call \"" + spec.name +
                         "\": it sets requires_grad of one of its inputs; a replay would " +
                         "not do that. Set it before the call, or on input.detach()");
    }
    refuse_composite_outputs("graphed call \"" + spec.name + "\"", outputs);
    refuse_hooks_of_body(spec.name, arguments, hidden, outputs);
  }
  if (clock) {
    clock->forward_ended();
  }
  hooks.after_forward();
  std::vector<at::Tensor> roots;
  std::vector<at::Tensor> seeds;
  for (const at::Tensor& output : outputs) {
    if (output.defined() && backward_may_begin_from(output) && !returns_parameter(output, inputs)) {
      roots.push_back(output);
      seeds.push_back(at::ones_like(output));
    }
  }
  const std::vector<at::Tensor> targets = wanted();
  std::vector<at::Tensor> grads(targets.size());
  if (!roots.empty()) {
    hooks.before_backward();
  }
  if (clock) {
    clock->backward_begins();
  }
  if (!roots.empty() && !targets.empty()) {
    std::vector<at::Tensor> found;
    std::copy_if(targets.begin(), targets.end(), std::back_inserter(found),
                 [&](const at::Tensor& t) { return !holds(known, t); });
    sandbox.hide_hooks(found);  // the backward finds these leaves by the accumulators that the forward made
    const CallStateGuard state(spec.state, Direction::backward);
    grads = backward ? backward(roots, targets, seeds)
                     : torch::autograd::grad(roots, targets, seeds, /*retain_graph=*/false, /*create_graph=*/false,
                                             /*allow_unused=*/true);
  }
  if (clock) {
    clock->ended();
  }
  if (!roots.empty()) {
    hooks.after_backward();
  }
  for (const at::Tensor& leaf : known) {
    if (leaf.grad().defined()) {
      throw CaptureError("graphed call \"" + spec.name +
                         "\": its backward adds into .grad (is there a checkpoint that calls " +
                         "backward() inside backward?); a capture would add twice. Use autograd::grad there, or run "
                         "the call outside of graphs");
    }
  }
  if (used != nullptr) {
    used->clear();
    for (const at::Tensor& grad : grads) {
      used->push_back(grad.defined());
    }
  }
  if (clock) {
    *pace = clock->pace();
  }
  return outputs;
}

std::vector<CallSizing> warm_up(const std::vector<CallSpec>& specs, const GraphOptions& options,
                                const PolicyOf& policy_of, Runtime& runtime, ScopeTree& tree, Exclusions& exclusions,
                                WeakStorageSet& met, const ProgressCallback& progress) {
  Sandbox sandbox;
  sandbox.draw_apart(generators_of(specs, runtime.device()));
  for (const CallSpec& spec : specs) {
    if (spec.module != nullptr) {
      sandbox.keep_buffers(spec.module->buffers());
      sandbox.hide_gradients(spec.module->parameters());
    }
  }
  PassWatch watch(runtime.device(), sandbox, exclusions, met);
  const RecorderGuard no_recorder(nullptr);
  if (options.pre_warmup_hook()) {
    options.pre_warmup_hook()();
  }
  std::vector<CallSizing> sizings;
  LinkedOutputs outputs(specs);
  for (const auto index : c10::irange(specs.size())) {
    const CallSpec& spec = specs[index];
    if (progress) {
      progress({ProgressPhase::warm_up, index, specs.size(), spec.name});
    }
    const Site site(Activity::warmup, spec.scope->site);
    std::vector<at::Tensor> inputs = leaves_of(spec, outputs, runtime.device());
    const ModelFlagsGuard flags(spec.state.modules);
    for (const auto i : c10::irange(inputs.size())) {
      if (spec.inputs[i].marked) {
        exclusions.mark(inputs[i]);
      }
    }
    watch.enter(spec, inputs, outputs.that_may_be_offloaded(index, options));
    detail::TensorBuffer made;
    const PassHooks hooks(spec.hooks.get(), met);
    SeedWatch seeds(sandbox.draws());
    {
      const Site sizing(Activity::sizing, spec.scope->site);
      sizings.push_back(size_call(spec, inputs, options, policy_of, tree, exclusions, watch, hooks, made));
      seeds.check(spec, options.num_warmup_iters() == 0);
    }
    outputs.add(inputs, made);
    made.clear();
    inputs.clear();  // only the body may hold them now
    sizings.back().outputs = outputs.use_by_latest(std::exchange(sizings.back().identities, {}));
    inputs = leaves_of(spec, outputs, runtime.device());
    for (std::int64_t i = 0; i < options.num_warmup_iters(); ++i) {
      // Else the gradients of the last pass may still take memory in this one.
      await_end_of_backward(runtime.device());
      const OperatorObserverGuard observer([&](const OperatorAccess& access) { watch.after(access); },
                                           [&](const OperatorAccess& access) { watch.before(access); },
                                           OperatorObserverGuard::Outer::hears_too);
      const bool timed = runtime.keeps_time() && i + 1 == options.num_warmup_iters();
      (void)eager_pass(
          spec, inputs,
          [&] {
            std::vector<at::Tensor> targets = requiring(inputs);
            targets.insert(targets.end(), sizings.back().parameters.begin(), sizings.back().parameters.end());
            return targets;
          },
          hooks, nullptr, &runtime, timed ? &sizings.back().pace : nullptr);
      observer.rethrow();
      seeds.check(spec, /*last=*/false);
    }
    await_end_of_backward(runtime.device());
    outputs.ran(index);
  }
  if (options.post_warmup_hook()) {
    const OperatorObserverGuard observer([&](const OperatorAccess& access) { watch.after(access); });
    options.post_warmup_hook()();
    observer.rethrow();
  }
  keep_outputs_that_several_need(sizings);
  return sizings;
}

}  // namespace sidestream
