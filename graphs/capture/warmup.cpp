#include "graphs/capture/warmup.h"

#include <cstdint>
#include <string>

#include <ATen/Context.h>
#include <ATen/core/Generator.h>

#include "base/site.h"
#include "graphs/capture/call_modes_guard.h"
#include "graphs/capture/eager_pass.h"
#include "graphs/capture/gradient_leaves.h"
#include "graphs/capture/pass_watch.h"
#include "graphs/capture/state_keeper.h"
#include "observe/operator_observer.h"
#include "sidestream/error.h"

namespace sidestream {

namespace {

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

/// Finds that a body seeds the device's generator: a replay would not. Another thread may do so once, meanwhile.
class SeedWatch {
 public:
  explicit SeedWatch(c10::Device device)
      : generator_(at::globalContext().defaultGenerator(device)), seed_(generator_.current_seed()) {}
  /// Behind a pass of `spec`'s body; `last`: none comes behind it.
  void check(const LayerSpec& spec, bool last) {
    if (generator_.current_seed() == seed_) {
      return;
    }
    if (++seeded_ > 1 || last) {
      throw CaptureError("graphed call \"" + spec.name +
                         "\": it seeds the device's generator, which its graphs would not; seed before the call");
    }
    generator_.set_current_seed(seed_);
  }

 private:
  at::Generator generator_;
  std::uint64_t seed_;
  int seeded_ = 0;
};

}  // namespace

std::vector<LayerSizing> warm_up(const std::vector<LayerSpec>& specs, const GraphOptions& options, Runtime& runtime,
                                 ScopeTree& tree, Exclusions& exclusions, WeakStorageSet& met,
                                 const ProgressCallback& progress) {
  const StateKeeper state(specs, runtime.device());
  PassWatch watch(runtime.device(), exclusions, met);
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
    SeedWatch seeds(runtime.device());
    {
      const Site sizing(Activity::sizing, spec.scope->site);
      sizings.push_back(size_layer(spec, inputs, options, tree, exclusions, watch, made));
      seeds.check(spec, options.num_warmup_iters() == 0);
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
      (void)eager_pass(
          spec, inputs,
          [&] {
            std::vector<at::Tensor> targets = requiring(inputs);
            targets.insert(targets.end(), sizings.back().parameters.begin(), sizings.back().parameters.end());
            return targets;
          },
          nullptr);
      seeds.check(spec, /*last=*/false);
    }
  }
  if (options.post_warmup_hook()) {
    const OperatorObserverGuard observer([&](const OperatorAccess& access) { watch.after(access); });
    options.post_warmup_hook()();
  }
  return sizings;
}

}  // namespace sidestream
