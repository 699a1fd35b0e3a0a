#include "graphs/capture/sizing_pass.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include <ATen/autocast_mode.h>
#include <c10/util/irange.h>
#include <torch/nn/module.h>

#include "graphs/capture/eager_pass.h"
#include "graphs/capture/observed_weights.h"
#include "graphs/gradients/gradient_leaves.h"
#include "observe/operator_observer.h"
#include "offload/sizing.h"
#include "sidestream/error.h"

namespace sidestream {

namespace {

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
                     ScopeTree& tree, Exclusions& exclusions, PassWatch& watch, const PassHooks& hooks,
                     detail::TensorBuffer& outputs) {
  CallSizing sizing;
  std::vector<at::Tensor> parameters;
  if (spec.module != nullptr) {
    parameters = requiring(spec.module->parameters());
  }
  const auto of_module = static_cast<std::ptrdiff_t>(parameters.size());
  ObservedWeights weights(watch.reads());
  const c10::DeviceType type = spec.state.modes.autocast.type;
  SavedTensorRecorder recorder(tree, exclusions, std::make_shared<SizingMover>(), nullptr);
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
          hooks, &used);
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
      throw UsageError("callable \"" + spec.name + "\": an input that requires a gradient gets none; pass it without " +
                       "requires_grad, or set GraphOptions::allow_unused_input");
    }
  }
  for (auto leaf = parameters.begin() + of_module; leaf != parameters.end(); ++leaf) {
    // Backward may unpack a weight as another tensor of the same memory. No code relocates that tensor, so it is no outside leaf.
    const bool known = std::any_of(parameters.begin(), leaf, [&](const at::Tensor& earlier) {
      return earlier.has_storage() && leaf->has_storage() && earlier.storage().is_alias_of(leaf->storage());
    });
    if (!known) {
      sizing.outside.push_back(*leaf);
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
  sizing.identities = recorder.identities();
  sizing.saved_bytes = recorder.saved_bytes();
  return sizing;
}

void keep_outputs_that_several_need(std::vector<CallSizing>& sizings) {
  std::map<std::pair<std::size_t, std::size_t>, std::size_t> needs;  // by call and output
  for (const auto i : c10::irange(sizings.size())) {
    for (const std::size_t kept : sizings[i].outputs.kept) {
      needs[{i, kept}] += 2;
    }
    for (const auto& [storage, output] : sizings[i].outputs.saved) {
      ++needs[{output.call, output.index}];
    }
  }
  for (const auto i : c10::irange(sizings.size())) {
    for (const auto& [storage, output] : sizings[i].outputs.saved) {
      if (output.call != i && needs[{output.call, output.index}] > 1) {
        sizings[i].profile.storages[storage].held_elsewhere = true;
      }
    }
  }
}

}  // namespace sidestream
