#include "graphs/capture/warmup.h"

#include <algorithm>
#include <optional>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/variable.h>

#include "graphs/capture/body_hooks.h"
#include "graphs/capture/gradient_routes.h"
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
  spec.body(inputs.data(), outputs);
  refuse_hooks_of_body(spec.name, outputs);
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

std::vector<at::Tensor> requiring(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  std::copy_if(tensors.begin(), tensors.end(), std::back_inserter(result),
               [](const at::Tensor& t) { return t.defined() && t.requires_grad(); });
  return result;
}

/// The sizing pass of one layer.
LayerSizing size_layer(const LayerSpec& spec, const std::vector<at::Tensor>& inputs, const GraphOptions& options,
                       ScopeTree& tree, Exclusions& exclusions, detail::TensorBuffer& outputs) {
  LayerSizing sizing;
  std::vector<at::Tensor> parameters;
  if (spec.module != nullptr) {
    parameters = requiring(spec.module->parameters());
  }
  ExternalReads reads;
  Recorder recorder(tree, exclusions, std::make_shared<SizingMover>(), nullptr);
  std::vector<bool> used;
  const std::vector<at::Tensor> differentiable = requiring(inputs);
  std::vector<at::Tensor> targets;
  {
    const OperatorObserverGuard observer([&](const OperatorAccess& access) {
      reads.observe(access);
      for (const at::Tensor& read : access.reads) {
        if (!read.is_leaf() || !read.requires_grad()) {
          continue;
        }
        const at::Tensor leaf = leaf_itself(read);
        if (!holds(inputs, leaf) && !holds(parameters, leaf)) {
          parameters.push_back(leaf);
        }
      }
    });
    const RecorderGuard recording(&recorder);
    outputs = pass(
        LayerSpec{spec.name,
                  spec.scope,
                  [&](const at::Tensor* in, detail::TensorBuffer& out) {
                    RecorderScope scope(recorder, spec.scope);
                    spec.body(in, out);
                    scope.end();
                  },
                  spec.module,
                  {}},
        inputs,
        [&] {
          targets = differentiable;
          targets.insert(targets.end(), parameters.begin(), parameters.end());
          return targets;
        },
        &used);
    observer.rethrow();
  }
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
  for (const ExternalStorage& external : reads.externals()) {
    const auto is_known = [&](const at::Tensor& t) {
      return t.defined() && t.has_storage() &&
             t.storage().unsafeGetStorageImpl() == external.storage.unsafeGetStorageImpl();
    };
    std::vector<at::Tensor> buffers = spec.module == nullptr ? std::vector<at::Tensor>() : spec.module->buffers();
    if (std::none_of(inputs.begin(), inputs.end(), is_known) &&
        std::none_of(parameters.begin(), parameters.end(), is_known) &&
        std::none_of(buffers.begin(), buffers.end(), is_known)) {
      sizing.externals.push_back(external.storage);
    }
  }
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

BareLeaves::BareLeaves(const std::vector<at::Tensor>& leaves, bool hooks_only) : hooks_only_(hooks_only) {
  for (const at::Tensor& leaf : leaves) {
    if (auto* meta = get_autograd_meta(leaf); meta != nullptr) {
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
    detail::TensorBuffer made;
    {
      const Site sizing(Activity::sizing, spec.scope->site);
      sizings.push_back(size_layer(spec, inputs, options, tree, exclusions, made));
    }
    auto& kept = outputs.emplace_back();
    for (const at::Tensor& output : made) {
      kept.push_back(output.defined() ? output.detach().requires_grad_(output.requires_grad()) : output);
    }
    made.clear();
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
