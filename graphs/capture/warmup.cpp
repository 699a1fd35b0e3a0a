#include "graphs/capture/warmup.h"

#include <algorithm>
#include <optional>

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include "graphs/capture/body_hooks.h"
#include "graphs/capture/call_state_guard.h"
#include "graphs/capture/gradient_routes.h"
#include "graphs/capture/observed_weights.h"
#include "graphs/capture/pass_watch.h"
#include "observe/operator_observer.h"
#include "offload/nested_backward.h"
#include "offload/sizing.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

using torch::autograd::impl::get_autograd_meta;

/// Gradients (hidden meanwhile), module buffers and the device's generator, put back at the end.
class StateKeeper {
 public:
  StateKeeper(const std::vector<LayerSpec>& specs, c10::Device device)
      : generator_(at::globalContext().defaultGenerator(device)), random_(generator_.get_state()) {
    const at::NoGradGuard no_grad;
    for (const LayerSpec& spec : specs) {
      if (spec.module != nullptr) {
        for (const at::Tensor& buffer : spec.module->buffers()) {
          buffers_.emplace_back(buffer, buffer.clone());
        }
      }
    }
    // Last, behind all that the device may refuse: an object that was not made puts nothing back.
    for (const LayerSpec& spec : specs) {
      if (spec.module != nullptr) {
        for (const at::Tensor& parameter : spec.module->parameters()) {
          gradients_.emplace_back(parameter, parameter.grad());
          parameter.mutable_grad() = at::Tensor();
        }
      }
    }
  }
  StateKeeper(const StateKeeper&) = delete;
  StateKeeper& operator=(const StateKeeper&) = delete;
  ~StateKeeper() {
    for (auto item = gradients_.rbegin(); item != gradients_.rend(); ++item) {  // a shared parameter's first entry last
      auto& [parameter, before] = *item;
      if (before.defined() || parameter.grad().defined()) {
        parameter.mutable_grad() = before;
      }
    }
    try {
      const at::NoGradGuard no_grad;
      for (auto& [buffer, before] : buffers_) {
        buffer.detach().copy_(before);
      }
      generator_.set_state(random_);
    } catch (const std::exception&) {  // a device that fails here has failed the pass already
    }
  }

 private:
  at::Generator generator_;
  at::Tensor random_;
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_;
};

/// `outputs`: of the layers before this one.
std::vector<at::Tensor> leaves_of(const std::vector<LayerSpec>& specs, const LayerSpec& spec,
                                  const std::vector<std::vector<at::Tensor>>& outputs) {
  std::vector<at::Tensor> leaves;
  for (const LayerInput& input : spec.inputs) {
    if (input.from && input.from->index >= outputs[input.from->layer].size()) {
      throw UsageError("callable \"" + spec.name + "\" takes output " + std::to_string(input.from->index) +
                       " of callable \"" + specs[input.from->layer].name + "\", which gives " +
                       std::to_string(outputs[input.from->layer].size()));
    }
    if (const std::size_t index = leaves.size(); input.aliases && input.aliases->same_as != index) {
      leaves.push_back(leaves[input.aliases->same_as]);
      continue;
    }
    const at::Tensor& source = input.from ? outputs[input.from->layer][input.from->index] : input.sample;
    leaves.push_back(source.defined() ? source.detach().requires_grad_(source.requires_grad()) : source);
  }
  return leaves;
}

bool holds(const std::vector<at::Tensor>& tensors, const at::Tensor& tensor) {
  return std::any_of(tensors.begin(), tensors.end(), [&](const at::Tensor& t) { return t.is_same(tensor); });
}

/// Takes `.grad` off leaves for its lifetime: what is there at the end of it was put there meanwhile.
class HiddenGradients {
 public:
  explicit HiddenGradients(const std::vector<at::Tensor>& leaves) {
    for (const at::Tensor& leaf : leaves) {
      if (leaf.grad().defined()) {
        gradients_.emplace_back(leaf, leaf.grad());
        leaf.mutable_grad() = at::Tensor();
      }
    }
  }
  HiddenGradients(const HiddenGradients&) = delete;
  HiddenGradients& operator=(const HiddenGradients&) = delete;
  ~HiddenGradients() {
    for (auto& [leaf, gradient] : gradients_) {
      leaf.mutable_grad() = gradient;
    }
  }

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_;
};

/// Forward and backward once. Returns the outputs; `used` gets, for each of `wanted`, whether it has a gradient.
detail::TensorBuffer pass(const LayerSpec& spec, const std::vector<at::Tensor>& inputs,
                          const std::function<std::vector<at::Tensor>()>& wanted, std::vector<bool>* used) {
  const std::vector<at::Tensor> known = wanted();
  const HiddenGradients hidden(known);
  const BareLeaves bare(known);
  const NestedBackwardRefusal no_nested;
  detail::TensorBuffer outputs;
  {
    const ForwardStateGuard state(spec.state);
    const std::vector<at::Tensor> arguments = arguments_of(spec, inputs);
    spec.body(arguments.data(), outputs);
    refuse_hooks_of_body(spec.name, arguments, outputs);
  }
  std::vector<at::Tensor> roots;
  std::vector<at::Tensor> seeds;
  for (const at::Tensor& output : outputs) {
    if (output.defined() && output.requires_grad()) {
      roots.push_back(output);
      seeds.push_back(at::ones_like(output));
    }
  }
  const std::vector<at::Tensor> targets = wanted();
  std::vector<at::Tensor> grads(targets.size());
  if (!roots.empty() && !targets.empty()) {
    std::vector<at::Tensor> found;
    std::copy_if(targets.begin(), targets.end(), std::back_inserter(found),
                 [&](const at::Tensor& t) { return !holds(known, t); });
    const BareLeaves bare_too(found, /*hooks_only=*/true);
    const BackwardStateGuard state(spec.state);
    grads = torch::autograd::grad(roots, targets, seeds, /*retain_graph=*/false, /*create_graph=*/false,
                                  /*allow_unused=*/true);
  }
  for (const at::Tensor& leaf : known) {
    if (leaf.grad().defined()) {
      throw CaptureError(
          "callable \"" + spec.name + "\": its backward adds into .grad itself (a checkpoint that calls " +
          "backward() inside backward?); a capture would add twice. Let it use autograd::grad, or run it outside " +
          "of graphs");
    }
  }
  if (used != nullptr) {
    used->clear();
    for (const at::Tensor& grad : grads) {
      used->push_back(grad.defined());
    }
  }
  return outputs;
}

/// Each once.
std::vector<at::Tensor> requiring(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.requires_grad() && !holds(result, tensor)) {
      result.push_back(tensor);
    }
  }
  return result;
}

/// What is wrong with the call says which one it is.
template <class Part>
void naming_call(const LayerSpec& spec, const Part& part) {
  try {
    part();
  } catch (const UsageError& error) {
    throw UsageError("graphed call \"" + spec.name + "\": " + error.what());
  }
}

/// The sizing pass of one layer.
LayerSizing size_layer(const LayerSpec& spec, const std::vector<at::Tensor>& inputs, const GraphOptions& options,
                       ScopeTree& tree, Exclusions& exclusions, PassWatch& watch, detail::TensorBuffer& outputs) {
  LayerSizing sizing;
  std::vector<at::Tensor> parameters;
  if (spec.module != nullptr) {
    parameters = requiring(spec.module->parameters());
  }
  ObservedWeights weights(watch.reads());
  const c10::DeviceType type = spec.state.modes.autocast.type;
  Recorder recorder(tree, exclusions, std::make_shared<SizingMover>(), nullptr);
  std::vector<bool> used;
  const std::vector<at::Tensor> differentiable = requiring(inputs);
  std::vector<at::Tensor> targets;
  {
    const OperatorObserverGuard observer(
        [&](const OperatorAccess& access) {
          watch.after(access);
          sizing.casts = sizing.casts || at::autocast::is_autocast_enabled(type);
          weights.observe(access);
          for (const at::Tensor& read : access.reads) {
            if (!read.is_leaf() || !read.requires_grad()) {
              continue;
            }
            const at::Tensor leaf = leaf_itself(read);
            if (!holds(inputs, leaf) && !holds(parameters, leaf)) {
              parameters.push_back(leaf);
            }
          }
        },
        [&](const OperatorAccess& access) { watch.before(access); });
    const RecorderGuard recording(&recorder);
    try {
      outputs = pass(
          LayerSpec{spec.name, spec.scope,
                    [&](const at::Tensor* in, detail::TensorBuffer& out) {
                      RecorderScope scope(recorder, spec.scope);
                      spec.body(in, out);
                      scope.end();
                      weights.backward_begins();
                    },
                    spec.module, spec.inputs, spec.state},
          inputs,
          [&] {
            targets = differentiable;
            targets.insert(targets.end(), parameters.begin(), parameters.end());
            return targets;
          },
          &used);
    } catch (const c10::Error&) {
      watch.check_inputs();  // an input that requires a gradient is a leaf here: LibTorch refuses to write it in place
      throw;
    }
    naming_call(spec, [&] { observer.rethrow(); });
  }
  watch.check();
  recorder.finish();
  for (std::size_t i = 0; i < targets.size(); ++i) {
    if (i >= differentiable.size()) {
      if (used[i]) {
        sizing.parameters.push_back(targets[i]);
      }
    } else if (!used[i] && !options.allow_unused_input() && !targets.empty()) {
      throw UsageError("callable \"" + spec.name + "\": an input that requires a gradient gets none; pass it without " +
                       "requires_grad, or set GraphOptions::allow_unused_input");
    }
  }
  weights.for_each_read([&](const c10::StorageImpl* storage, const c10::VariableVersion& version) {
    const auto is_it = [&](const at::Tensor& t) {
      return t.defined() && t.has_storage() && t.storage().unsafeGetStorageImpl() == storage;
    };
    if (std::any_of(inputs.begin(), inputs.end(), is_it)) {
      return;  // the graph has a copy of its own
    }
    const auto named = std::find_if(parameters.begin(), parameters.end(), is_it);
    const std::string name = named == parameters.end() ? "" : spec.state.modules.name_of(*named);
    sizing.backward_reads.push_back({version, name.empty() ? "a tensor" : "\"" + name + "\""});
  });
  sizing.profile = recorder.profile();
  sizing.scopes = recorder.group_scopes();
  sizing.saved_bytes = recorder.saved_bytes();
  return sizing;
}

}  // namespace

struct BareLeaves::Saved {
  at::Tensor leaf;  // keeps `meta` alive
  torch::autograd::AutogradMeta* meta;
  std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>> hooks;
  std::weak_ptr<torch::autograd::Node> accumulator;
};

std::vector<at::Tensor> arguments_of(const LayerSpec& spec, const std::vector<at::Tensor>& leaves) {
  std::vector<at::Tensor> arguments = leaves;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const LayerInput& input = spec.inputs[i];
    if (input.aliases && input.aliases->same_as != i) {
      arguments[i] = arguments[input.aliases->same_as];
    } else if (leaves[i].defined() && leaves[i].requires_grad() && !input.shared_cast) {
      arguments[i] = leaves[i].view_as(leaves[i]);
    }
  }
  return arguments;
}

BareLeaves::BareLeaves(const std::vector<at::Tensor>& leaves, bool hooks_only) : hooks_only_(hooks_only) {
  for (const at::Tensor& leaf : leaves) {
    const bool known =
        std::any_of(saved_.begin(), saved_.end(), [&](const Saved& saved) { return saved.leaf.is_same(leaf); });
    if (auto* meta = get_autograd_meta(leaf); meta != nullptr && !known) {
      Saved saved{leaf, meta, {}, {}};
      std::swap(meta->hooks_, saved.hooks);
      if (!hooks_only_) {
        std::swap(meta->grad_accumulator_, saved.accumulator);
      }
      saved_.push_back(std::move(saved));
    }
  }
}

BareLeaves::~BareLeaves() {
  for (Saved& saved : saved_) {
    std::swap(saved.meta->hooks_, saved.hooks);
    if (!hooks_only_) {
      saved.meta->grad_accumulator_ = std::move(saved.accumulator);
    }
  }
}

std::vector<LayerSizing> warm_up(const std::vector<LayerSpec>& specs, const GraphOptions& options, Runtime& runtime,
                                 ScopeTree& tree, Exclusions& exclusions, const ProgressCallback& progress) {
  const StateKeeper state(specs, runtime.device());
  PassWatch watch(runtime.device(), exclusions);
  const RecorderGuard no_recorder(nullptr);
  if (options.pre_warmup_hook()) {
    options.pre_warmup_hook()();
  }
  std::vector<LayerSizing> sizings;
  std::vector<std::vector<at::Tensor>> outputs;  // detached; what the next layers' samples are
  for (const LayerSpec& spec : specs) {
    if (progress) {
      progress({ProgressPhase::warm_up, sizings.size(), specs.size(), spec.name});
    }
    const Site site(Activity::warmup, spec.scope->site);
    const std::vector<at::Tensor> inputs = leaves_of(specs, spec, outputs);
    const ModelFlagsGuard flags(spec.state.modules);
    watch.enter(spec, inputs);
    detail::TensorBuffer made;
    {
      const Site sizing(Activity::sizing, spec.scope->site);
      sizings.push_back(size_layer(spec, inputs, options, tree, exclusions, watch, made));
    }
    auto& kept = outputs.emplace_back();
    for (const at::Tensor& output : made) {
      kept.push_back(output.defined() ? output.detach().requires_grad_(output.requires_grad()) : output);
    }
    made.clear();
    const OperatorObserverGuard observer([&](const OperatorAccess& access) { watch.after(access); },
                                         [&](const OperatorAccess& access) { watch.before(access); },
                                         OperatorObserverGuard::Outer::hears_too);
    for (std::int64_t i = 0; i < options.num_warmup_iters(); ++i) {
      pass(
          spec, inputs,
          [&] {
            std::vector<at::Tensor> targets = requiring(inputs);
            targets.insert(targets.end(), sizings.back().parameters.begin(), sizings.back().parameters.end());
            return targets;
          },
          nullptr);
    }
  }
  if (options.post_warmup_hook()) {
    options.post_warmup_hook()();
  }
  return sizings;
}

}  // namespace sidestream
