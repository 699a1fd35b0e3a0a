#pragma once
#include <vector>

#include "graphs/capture/sizing_pass.h"
#include "graphs/guards/call_spec.h"
#include "offload/exclusions.h"
#include "offload/scope_tree.h"
#include "runtime/runtime.h"
#include "runtime/weak_storage_set.h"
#include "sidestream/graph_options.h"
#include "sidestream/progress.h"

namespace sidestream {

/// Runs every call eagerly on the current stream, forward and backward: once under the recorder and the operator observer
/// (the sizing pass), then `num_warmup_iters` times without offload, all between the two hooks. A Sandbox puts back gradients, module
/// buffers, other tensors that operators wrote and did not make, and the random state. No memory of the passes is kept.
/// `met` gets the storages that the passes touched and that are alive.
/// Capture: illegal.  Throws: UsageError (an input without gradient, or on another device), CaptureError (what graphs would
/// freeze: see PassWatch), and errors of the callables.
[[nodiscard]] std::vector<CallSizing> warm_up(const std::vector<CallSpec>& specs, const GraphOptions& options,
                                              Runtime& runtime, ScopeTree& tree, Exclusions& exclusions,
                                              WeakStorageSet& met, const ProgressCallback& progress);

}  // namespace sidestream
