#pragma once
#include <cstdint>
#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "analysis/copy_pace.h"
#include "analysis/planner.h"
#include "graphs/gradients/call_gradients.h"
#include "graphs/guards/call_spec.h"
#include "graphs/outputs/linked_outputs.h"
#include "graphs/sandbox/pass_watch.h"
#include "graphs/sequence/captured_call.h"
#include "offload/exclusions.h"
#include "offload/saved_tensor_recorder.h"
#include "offload/scope_tree.h"
#include "runtime/runtime.h"
#include "runtime/weak_storage_set.h"
#include "sidestream/capture_time_hooks.h"
#include "sidestream/detail/argument_parts.h"
#include "sidestream/graph_options.h"
#include "sidestream/progress.h"

namespace sidestream {

/// Runs the hooks of one callable around its passes. What hooks do is not recorded, sized or put back as part of the pass. A capture may
/// read what they touch.
/// Capture: illegal, unless there are no hooks.
class PassHooks {
 public:
  /// Both must outlive this object; `hooks` may be null.
  PassHooks(const CaptureTimeHooks* hooks, WeakStorageSet& met) noexcept : hooks_(hooks), met_(met) {}

  void before_forward() const;
  void after_forward() const;
  void before_backward() const;
  void after_backward() const;

 private:
  void run(const std::function<void()>& hook) const;

  const CaptureTimeHooks* hooks_;
  WeakStorageSet& met_;
};

/// Computes the gradients of `leaves`. `seeds`: one for each root.
using BackwardPass = std::function<std::vector<at::Tensor>(
    const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& leaves, const std::vector<at::Tensor>& seeds)>;

/// Runs the body of `spec` once in the state of the call: forward, then backward with ones as the gradients of its outputs. Returns the
/// outputs. `wanted` returns the leaves whose gradients are computed. It is called before the forward, and again after it, because the
/// forward may have found more leaves. `used`, unless null, gets for each leaf of the second call whether it has a gradient. `pace`,
/// unless null, gets the times of the pass without the hooks, by the clock of `runtime`, which must not be null then. `backward`, unless
/// empty, computes the gradients of the leaves from roots and seeds. `.grad` is not changed.
/// Throws: CaptureError if a backward adds into `.grad` itself or an argument has hooks; errors of the body.
[[nodiscard]] detail::TensorBuffer eager_pass(const CallSpec& spec, const std::vector<at::Tensor>& inputs,
                                              const std::function<std::vector<at::Tensor>()>& wanted,
                                              const PassHooks& hooks, std::vector<bool>* used,
                                              Runtime* runtime = nullptr, LayerPace* pace = nullptr,
                                              const BackwardPass& backward = {});

/// The result of the sizing pass of one call.
struct CallSizing {
  Profile profile;                        ///< groups and storages that autograd saved
  std::vector<const ScopeNode*> scopes;   ///< of the profile's groups
  std::vector<SavedIdentity> identities;  ///< of the profile's storages
  LinkedOutputs::Use outputs;             ///< its saved storages are the profile's
  std::vector<at::Tensor> parameters;     ///< leaves that got a gradient, the module's first, in their order
  std::vector<at::Tensor> outside;  ///< leaves that the body read, except inputs, and that its module does not have
  std::vector<BackwardRead> backward_reads;
  bool casts = false;  ///< autocast was on somewhere in it
  std::uint64_t saved_bytes = 0;
  LayerPace pace;  ///< of the latest warm-up pass; zero where there was none, or no clock to time it by
};

/// The sizing pass of one call, whose body is run on `inputs`: forward and backward once, under the recorder and the operator
/// observer. `watch` has entered the call; `outputs` gets what the body gave. If `policy_of` delays gradients, the backward is split.
/// Capture: illegal.  Throws: UsageError (an input without gradient), CaptureError (see PassWatch), and errors of the body.
[[nodiscard]] CallSizing size_call(const CallSpec& spec, const std::vector<at::Tensor>& inputs,
                                   const GraphOptions& options, const PolicyOf& policy_of, ScopeTree& tree,
                                   Exclusions& exclusions, PassWatch& watch, const PassHooks& hooks,
                                   detail::TensorBuffer& outputs);

/// Marks in the profiles the inputs that stay on the device. Offloading an output frees its memory only if one call saves it, as an
/// input, and no body keeps it.
void keep_outputs_that_several_need(std::vector<CallSizing>& sizings);

/// Runs every call eagerly on the current stream, forward and backward: once under the recorder and the operator observer
/// (the sizing pass), then `num_warmup_iters` times without offload, all between the two hooks. A Sandbox puts back gradients, module
/// buffers, other tensors that operators wrote and did not make, and the random state. No memory of the passes is kept.
/// `met` gets the storages that the passes touched and that are alive.
/// Capture: illegal.  Throws: UsageError (an input without gradient, or on another device), CaptureError (what graphs would
/// freeze: see PassWatch), and errors of the callables.
[[nodiscard]] std::vector<CallSizing> warm_up(const std::vector<CallSpec>& specs, const GraphOptions& options,
                                              const PolicyOf& policy_of, Runtime& runtime, ScopeTree& tree,
                                              Exclusions& exclusions, WeakStorageSet& met,
                                              const ProgressCallback& progress);

}  // namespace sidestream
