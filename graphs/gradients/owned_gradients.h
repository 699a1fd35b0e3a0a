#pragma once
#include <memory>
#include <unordered_map>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include "graphs/sequence/captured_call.h"

namespace sidestream {

// With GradientPolicy::accumulated: the `.grad`s that a call's backward graph adds into by itself.

/// What graphs add into.
struct OwnedGradient {
  at::Tensor attached;  ///< what a parameter has as its `.grad`; may be given other memory (`set_data`)
  at::Tensor memory;    ///< over the graphs' memory: nobody else has this tensor
};

/// `attached`, put back into the graphs' `memory` where it was given other.
const at::Tensor& in_graphs_memory(const at::Tensor& attached, const at::Tensor& memory);
inline const at::Tensor& to_attach(const OwnedGradient& gradient) {
  return in_graphs_memory(gradient.attached, gradient.memory);
}

/// Which they are, for one engine: captures that add into the gradient of the same parameter (microbatches in flight, other
/// shapes) share it. Holds weak references only. Threads: the step's.
class OwnedGradients {
 public:
  /// What graphs add into: what another capture of `parameter` does, else its `.grad`, else new zeros. Attaches nothing: a
  /// parameter has no `.grad` before a backward gives it one.
  /// Throws: UsageError where captures add into one that was given other memory since.
  [[nodiscard]] OwnedGradient of(const at::Tensor& parameter);

  /// Autograd forgets which leaf a backward asks for by name when nobody has that leaf's accumulator, and none of these has an
  /// edge to it: so they are held (see refuse_owned_gradients), but in captures, which belong to other streams.
  void hold_accumulators();
  void release_accumulators() noexcept;

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Entry {
    WeakTensor parameter;  ///< keeps the address from being used again
    WeakTensor attached;
    WeakTensor memory;
    std::shared_ptr<torch::autograd::Node> accumulator;
  };
  std::unordered_map<const c10::TensorImpl*, Entry> entries_;
};

/// True where the values of a `.grad` may go to `memory`: nobody could tell. What graphs attach is theirs, wherever it lies by now.
[[nodiscard]] bool held_by_parameter_alone(const at::Tensor& grad, const at::Tensor& attached,
                                           const at::Tensor& memory);

/// True where `parameter` has hooks that fire when its gradient comes: a graph would not run them.
[[nodiscard]] bool has_gradient_hooks(const at::Tensor& parameter);

/// True where all of `gradients` lie where the graph adds into, and none has a hook: neither function below has anything to do.
/// One pass, without allocation: all that nearly every replay pays for them.
[[nodiscard]] bool are_in_place(const std::vector<AccumulatedGradient>& gradients);

/// Before anything of the backward is queued. Throws: UsageError where the graph cannot do what plain training does.
void check_owned_grads(const CapturedCall& call);

/// Attaches what the graph adds into, for parameters that one of the outputs in `used` leads to. A `.grad` that was none is
/// zeroed and attached; one that autograd has put there meanwhile, and that nobody else holds, is taken over with its values.
void attach_owned_grads(CapturedCall& call, OutputSet used);

}  // namespace sidestream
