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

// Gradient hooks that a callable's body registers. Hooks on tensors that the body makes are captured, as its operators are. Effects of a
// hook other than computation happen at the capture, and at no replay.

/// True if the autograd graph of `outputs` has such hooks.
[[nodiscard]] bool has_hooks_of_body(const detail::TensorBuffer& outputs);

/// A hook on an input or a parameter gets, in plain training, what code outside of the call adds to the gradient as well; and
/// retain_grad gives a tensor a `.grad` that no replay writes.
/// `arguments`: as the body got them.
/// Throws: CaptureError for both.
void refuse_hooks_of_body(const std::string& name, const std::vector<at::Tensor>& arguments,
                          const detail::TensorBuffer& outputs);

// Note [Gradients through tensors that a body keeps]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A backward pass that reaches the history of a capture, or of a verifying run, throws.
//
// A body may keep a tensor in a member of its module, and the trainer then adds that tensor to a loss: a router's balancing term, a
// penalty. Each replay writes the tensor's value anew, but its history is that of the run that made it. A backward pass through that
// history would end at that run's leaves: the gradient would be lost without a message, or the pass would read freed memory. The nodes
// throw from the moment when all backwards have been captured. The capture's own backwards are over by then; as autograd::grad they run
// no accumulator.

/// Makes `node` throw a UsageError that names `call`, whenever autograd runs it.
void refuse_to_run(torch::autograd::Node& node, const std::string& call);

/// The history of one sequence's forwards, while they are captured.
class CapturedHistory {
 public:
  /// A forward of `call` has been captured. `leaves`: its inputs; `parameters`: those whose accumulators the capture made.
  void add(const std::string& call, const std::vector<at::Tensor>& leaves, const std::vector<at::Tensor>& parameters,
           const detail::TensorBuffer& outputs);
  /// All backwards have been captured: what others keep alive of the history throws from here on.
  void refuse_to_run();

 private:
  std::vector<std::pair<std::weak_ptr<torch::autograd::Node>, std::string>> nodes_;
};

}  // namespace sidestream
