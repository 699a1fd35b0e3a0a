// The sizing pass, which is the first pass of a warm-up.
#include "graphs/capture/warmup.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include "graphs/capture/observed_weights.h"
#include "graphs/gradients/backward_split.h"
#include "graphs/gradients/gradient_leaves.h"
#include "memory/storage_view.h"
#include "observe/operator_observer.h"
#include "offload/saved_storage.h"
#include "offload/version_stamp.h"
#include "runtime/composite.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// Offloads nothing: the backward of the sizing pass follows at once. If weight gradients are delayed, that backward has two parts. This
/// class learns which saved storages the first part reads: what LibTorch's own nodes give to operators, and all that other nodes unpack.
/// LibTorch's own nodes unpack also what they do not read.
/// Threads: autograd's, while the caller waits.
class SplitSizing final : public StorageMover {
 public:
  void group_ended(Group& /*group*/) override {}
  void dropped(SavedStorage& /*storage*/) noexcept override {}
  c10::Storage fetch(SavedStorage& storage) override {
    if (in_first_) {
      if (const auto node = torch::autograd::get_current_node(); node == nullptr || !computes_only_needed(*node)) {
        read(storage.device);
      }
    }
    return storage.device;
  }

  void observe(const OperatorAccess& access) {
    for (const at::Tensor& tensor : access.reads) {
      if (in_first_) {
        for_each_part(tensor, [this](const at::Tensor& part) {
          if (part.has_storage()) {
            read(part.storage());
          }
        });
      }
    }
  }

  /// As BackwardPass; those of `leaves` that are `delayed` come in the second part.
  std::vector<at::Tensor> backward(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& leaves,
                                   const std::vector<bool>& delayed, const std::vector<at::Tensor>& seeds) {
    std::vector<at::Tensor> first;
    std::vector<at::Tensor> second;
    for (const auto i : c10::irange(leaves.size())) {
      (delayed[i] ? second : first).push_back(leaves[i]);
    }
    BackwardSplit split(torch::autograd::collect_next_edges(roots), first, second);
    in_first_ = true;
    std::vector<at::Tensor> early = split.run_first(seeds);
    in_first_ = false;
    has_second_ = split.has_second();
    std::vector<at::Tensor> late = split.run_second();
    std::vector<at::Tensor> grads;
    for (std::size_t i = 0, next_first = 0, next_second = 0; i < leaves.size(); ++i) {
      if (delayed[i]) {
        at::Tensor& in_first = early[first.size() + next_second];
        grads.push_back(in_first.defined() ? in_first : late[next_second]);
        ++next_second;
      } else {
        grads.push_back(early[next_first++]);
      }
    }
    return grads;
  }
  /// Marks in `profile` what only the second part reads.
  void mark(Profile& profile, const std::vector<SavedIdentity>& identities) const {
    for (const auto i : c10::irange(identities.size())) {
      profile.storages[i].for_weights = has_second_ && read_.count(identities[i].storage._unsafe_get_target()) == 0;
    }
  }

 private:
  void read(const c10::Storage& storage) {
    const std::lock_guard lock(mutex_);
    read_.insert(storage.unsafeGetStorageImpl());
  }

  std::atomic<bool> in_first_{false};
  bool has_second_ = false;
  std::mutex mutex_;
  std::unordered_set<const c10::StorageImpl*> read_;  // in the first part, in which no saved tensor dies
};

/// Errors of the call name it.
template <class Part>
void naming_call(const CallSpec& spec, const Part& part) {
  try {
    part();
  } catch (const UsageError& error) {
    throw UsageError("graphed call \"" + spec.name + "\": " + error.what());
  }
}

}  // namespace

CallSizing size_call(const CallSpec& spec, const std::vector<at::Tensor>& inputs, const GraphOptions& options,
                     const PolicyOf& policy_of, ScopeTree& tree, Exclusions& exclusions, PassWatch& watch,
                     const PassHooks& hooks, detail::TensorBuffer& outputs) {
  CallSizing sizing;
  std::vector<at::Tensor> parameters;
  if (spec.module != nullptr) {
    parameters = requiring(spec.module->parameters());
  }
  const auto of_module = static_cast<std::ptrdiff_t>(parameters.size());
  ObservedWeights weights(watch.reads());
  const c10::DeviceType type = spec.state.modes.autocast.type;
  const auto split = std::make_shared<SplitSizing>();
  SavedTensorRecorder recorder(tree, exclusions, split, nullptr);
  std::vector<bool> used;
  const std::vector<at::Tensor> differentiable = requiring(inputs);
  std::vector<at::Tensor> targets;
  {
    const OperatorObserverGuard observer(
        [&](const OperatorAccess& access) {
          watch.after(access);
          sizing.casts = sizing.casts || at::autocast::is_autocast_enabled(type);
          weights.observe(access);
          split->observe(access);
          for (const at::Tensor& read : access.reads) {
            // A view that was made without gradients has no node either, but its base's flag.
            const auto* const meta = torch::autograd::impl::get_autograd_meta(read);
            if (meta == nullptr || !meta->requires_grad_ || !read.is_leaf()) {
              continue;
            }
            const at::Tensor leaf = leaf_itself(read);
            if (!holds(inputs, leaf) && !holds(parameters, leaf) && !weights.made_inside(leaf)) {
              parameters.push_back(leaf);
            }
          }
        },
        [&](const OperatorAccess& access) { watch.before(access); });
    const RecorderGuard recording(&recorder);
    try {
      outputs = eager_pass(
          CallSpec{spec.name, spec.scope,
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
          hooks, &used, nullptr, nullptr,
          [&](const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& leaves,
              const std::vector<at::Tensor>& seeds) {
            std::vector<bool> delayed;
            for (const auto i : c10::irange(leaves.size())) {
              delayed.push_back(i >= differentiable.size() && policy_of(spec, leaves[i]) == GradientPolicy::delayed);
            }
            return std::find(delayed.begin(), delayed.end(), true) != delayed.end()
                       ? split->backward(roots, leaves, delayed, seeds)
                       : torch::autograd::grad(roots, leaves, seeds, /*retain_graph=*/false, /*create_graph=*/false,
                                               /*allow_unused=*/true);
          });
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
    } else if (!used[i] && spec.state.modes.gradients && !options.allow_unused_input() && !targets.empty()) {
      const auto unused = std::find_if(inputs.begin(), inputs.end(),
                                       [&](const at::Tensor& input) { return input.is_same(targets[i]); });
      throw UsageError("graphed call \"" + spec.name + "\": input " + std::to_string(unused - inputs.begin()) +
                       " requires a gradient but gets none; pass it without requires_grad, or set " +
                       "GraphOptions::allow_unused_input");
    }
  }
  for (auto leaf = parameters.begin() + of_module; leaf != parameters.end(); ++leaf) {
    // Backward may unpack a weight or an input as another tensor of the same memory. No code relocates that tensor, so it is no outside
    // leaf. Held here, an input would also count as kept by the body.
    const auto shares = [&](const at::Tensor& other) { return share_memory(*leaf, other); };
    if (std::none_of(parameters.begin(), leaf, shares) && std::none_of(inputs.begin(), inputs.end(), shares)) {
      sizing.outside.push_back(*leaf);
    }
  }
  std::vector<at::Tensor> named_tensors = parameters;
  if (spec.module != nullptr) {
    const std::vector<at::Tensor> buffers = spec.module->buffers();
    named_tensors.insert(named_tensors.end(), buffers.begin(), buffers.end());
  }
  weights.for_each_read([&](const c10::StorageImpl* storage, const c10::VariableVersion& version) {
    if (std::any_of(inputs.begin(), inputs.end(),
                    [&](const at::Tensor& input) { return storage_impl_of(input) == storage; })) {
      return;  // the graph has a copy of its own
    }
    // Not by storage: parameters may be parts of one buffer.
    const auto named = std::find_if(named_tensors.begin(), named_tensors.end(), [&](const at::Tensor& tensor) {
      return tensor.defined() && is_same(torch::autograd::impl::version_counter(tensor), version);
    });
    const std::string name = named == named_tensors.end() ? "" : spec.state.modules.name_of(*named);
    sizing.backward_reads.push_back({version, name.empty() ? "a tensor" : "\"" + name + "\""});
  });
  sizing.profile = recorder.profile();
  sizing.scopes = recorder.group_scopes();
  sizing.identities = recorder.identities();
  split->mark(sizing.profile, sizing.identities);
  sizing.saved_bytes = recorder.saved_bytes();
  return sizing;
}

void keep_outputs_that_several_need(std::vector<CallSizing>& sizings) {
  std::map<std::pair<std::size_t, std::size_t>, std::size_t> needs;  // by call and output
  std::set<std::pair<std::size_t, std::size_t>> counted;
  for (const auto i : c10::irange(sizings.size())) {
    for (const Link& kept : sizings[i].outputs.kept) {
      needs[{kept.call, kept.index}] += 2;
    }
    for (const auto& [storage, output] : sizings[i].outputs.saved) {
      ++needs[{output.call, output.index}];
      if (output.call == i) {
        counted.insert({output.call, output.index});
      }
    }
  }
  for (const auto i : c10::irange(sizings.size())) {
    for (const auto& [storage, output] : sizings[i].outputs.saved) {
      if (output.call != i && needs[{output.call, output.index}] > 1) {
        StorageProfile& saved = sizings[i].profile.storages[storage];
        saved.held_elsewhere = true;
        saved.counted_elsewhere = !counted.insert({output.call, output.index}).second;
      }
    }
  }
}

}  // namespace sidestream
