#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "sidestream/detail/argument_parts.h"

namespace torch::autograd {
struct Node;
}

namespace sidestream {

// Gradient hooks that a callable's body registers. Hooks on tensors that the body makes are captured with its operators. If such a
// hook also does work on the host, that work happens in the capture and in no replay.

/// True if the autograd graph of `outputs` has such hooks.
[[nodiscard]] bool has_hooks_of_body(const detail::TensorBuffer& outputs);

/// Refuses two kinds of hooks. In plain training a hook on an input or a parameter also gets the gradients that code outside of the
/// call adds. retain_grad gives a tensor a `.grad` that no replay writes.
/// `arguments`: as the body got them. `hidden`: leaves whose earlier hooks are hidden. Hooks of other leaves may be the program's.
/// Throws: CaptureError for both.
void refuse_hooks_of_body(const std::string& name, const std::vector<at::Tensor>& arguments,
                          const std::vector<at::Tensor>& hidden, const detail::TensorBuffer& outputs);

// Note [Gradients through tensors that a body keeps]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A body may keep a tensor in a member of its module, and the trainer then adds that tensor to a loss: a router's balancing term, a
// penalty. Each replay writes the tensor's value again, but its history stays that of the run that made it. A backward pass through
// that history would end at the leaves of that run. The gradient would be lost silently, or the pass would read freed memory. So the
// history that is left of a capture or of a verifying run throws when a backward pass reaches it. The capture's own autograd::grad is
// not affected: it runs no accumulator, and it ends before.

/// Makes `node` throw a UsageError that names `call` whenever autograd runs the node.
void refuse_to_run(torch::autograd::Node& node, const std::string& call);

/// The history of one sequence's forwards, while they are captured.
class CapturedHistory {
 public:
  /// Notes a captured forward of `call`. `leaves`: its inputs. `parameters`: those whose accumulators the capture made.
  void add(const std::string& call, const std::vector<at::Tensor>& leaves, const std::vector<at::Tensor>& parameters,
           const detail::TensorBuffer& outputs);
  /// Call when all backwards have been captured. From then on the nodes that are still alive throw when a backward runs them.
  void refuse_to_run();

 private:
  std::vector<std::pair<std::weak_ptr<torch::autograd::Node>, std::string>> nodes_;
};

}  // namespace sidestream
