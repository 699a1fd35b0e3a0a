#include "graphs/capture/warmup.h"

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/irange.h>
#include <torch/nn/module.h>

#include "base/site.h"
#include "graphs/capture/eager_pass.h"
#include "graphs/gradients/gradient_leaves.h"
#include "graphs/guards/call_modes.h"
#include "graphs/guards/call_spec.h"
#include "graphs/outputs/linked_outputs.h"
#include "graphs/outputs/storage_holders.h"
#include "graphs/sandbox/pass_watch.h"
#include "graphs/sandbox/sandbox.h"
#include "observe/operator_observer.h"
#include "sidestream/error.h"

namespace sidestream {

namespace {

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

std::vector<CallSizing> warm_up(const std::vector<CallSpec>& specs, const GraphOptions& options, Runtime& runtime,
                                ScopeTree& tree, Exclusions& exclusions, WeakStorageSet& met,
                                const ProgressCallback& progress) {
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
    const std::vector<at::Tensor> inputs = leaves_of(spec, outputs, runtime.device());
    const ModelFlagsGuard flags(spec.state.modules);
    watch.enter(spec, inputs, outputs.that_may_be_offloaded(index, options));
    detail::TensorBuffer made;
    const PassHooks hooks(spec.hooks.get(), met);
    SeedWatch seeds(sandbox.draws());
    {
      const Site sizing(Activity::sizing, spec.scope->site);
      sizings.push_back(size_call(spec, inputs, options, tree, exclusions, watch, hooks, made));
      seeds.check(spec, options.num_warmup_iters() == 0);
    }
    outputs.add(inputs, made);
    made.clear();
    sizings.back().outputs = outputs.use_by_latest(std::exchange(sizings.back().identities, {}));
    for (std::int64_t i = 0; i < options.num_warmup_iters(); ++i) {
      // Else the gradients of the last pass may still take memory in this one.
      await_end_of_backward(runtime.device());
      const OperatorObserverGuard observer([&](const OperatorAccess& access) { watch.after(access); },
                                           [&](const OperatorAccess& access) { watch.before(access); },
                                           OperatorObserverGuard::Outer::hears_too);
      std::optional<PassClock> clock;
      if (runtime.keeps_time() && i + 1 == options.num_warmup_iters()) {
        clock.emplace(runtime);
      }
      (void)eager_pass(
          spec, inputs,
          [&] {
            std::vector<at::Tensor> targets = requiring(inputs);
            targets.insert(targets.end(), sizings.back().parameters.begin(), sizings.back().parameters.end());
            return targets;
          },
          hooks, nullptr, clock ? &*clock : nullptr);
      if (clock) {
        sizings.back().pace = clock->pace();
      }
      seeds.check(spec, /*last=*/false);
    }
    await_end_of_backward(runtime.device());
    outputs.ran(index);
  }
  if (options.post_warmup_hook()) {
    const OperatorObserverGuard observer([&](const OperatorAccess& access) { watch.after(access); });
    options.post_warmup_hook()();
  }
  keep_outputs_that_several_need(sizings);
  return sizings;
}

}  // namespace sidestream
