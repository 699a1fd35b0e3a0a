#pragma once
#include <vector>

#include "analysis/planner.h"
#include "graphs/replay/layer.h"
#include "offload/exclusions.h"
#include "offload/recorder.h"
#include "sidestream/graph_options.h"
#include "sidestream/progress.h"

namespace sidestream {

/// What the sizing pass of one layer found.
struct LayerSizing {
  Profile profile;                       ///< groups and storages that autograd saved
  std::vector<const ScopeNode*> scopes;  ///< of the profile's groups
  std::vector<at::Tensor> parameters;    ///< leaves that got a gradient, the module's first, in their order
  std::vector<BackwardRead> backward_reads;
  bool casts = false;  ///< autocast was on somewhere in it
  std::uint64_t saved_bytes = 0;
};

/// Runs every layer eagerly on the current stream, forward and backward: once under the recorder and the operator observer
/// (the sizing pass), then `num_warmup_iters` times with offload off, all between the two hooks. Gradients, module buffers, what
/// else operators wrote and did not make, and the random state are then as before; nothing of the passes' memory is kept.
/// Capture: illegal.  Throws: UsageError (an input without gradient, or on another device), CaptureError (what graphs would
/// freeze: see PassWatch), and what the callables throw.
[[nodiscard]] std::vector<LayerSizing> warm_up(const std::vector<LayerSpec>& specs, const GraphOptions& options,
                                               Runtime& runtime, ScopeTree& tree, Exclusions& exclusions,
                                               const ProgressCallback& progress);

/// What the body is given for the leaves that stand for its inputs: those themselves, or tensors of the same memory that are no
/// leaves, as the call was given.
[[nodiscard]] std::vector<at::Tensor> arguments_of(const LayerSpec& spec, const std::vector<at::Tensor>& leaves);

/// Takes tensor hooks and gradient accumulators off leaves for its lifetime: autograd::grad would run the hooks (their work
/// would be captured and then run twice), and an accumulator that an eager step made ties the capture to that step's stream.
/// Leaves that a forward has read keep their accumulators until its backward, which finds them by these (`hooks_only`).
class [[nodiscard]] BareLeaves {
 public:
  explicit BareLeaves(const std::vector<at::Tensor>& leaves, bool hooks_only = false);
  BareLeaves(const BareLeaves&) = delete;
  BareLeaves& operator=(const BareLeaves&) = delete;
  ~BareLeaves();

 private:
  struct Saved;
  std::vector<Saved> saved_;
  bool hooks_only_;
};

}  // namespace sidestream
