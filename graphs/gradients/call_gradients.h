#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include "graphs/guards/call_spec.h"
#include "graphs/outputs/output_storage.h"
#include "graphs/outputs/static_tensors.h"
#include "memory/storage_view.h"
#include "offload/saved_storage.h"
#include "runtime/runtime.h"
#include "sidestream/detail/module_forward.h"
#include "sidestream/graph_options.h"

namespace sidestream {

/// Says which policy the gradient of a parameter has, in one sequence's calls. See GraphOptions::gradients.
using PolicyOf = std::function<GradientPolicy(const CallSpec& spec, const at::Tensor& parameter)>;
/// `model`: the engine's, or null. Throws: UsageError for a pattern that fits no parameter of the model or of the calls' modules,
/// and no call.
[[nodiscard]] PolicyOf gradient_policies(const GraphOptions& options, const torch::nn::Module* model,
                                         const std::vector<CallSpec>& specs);

/// True if a rule delays gradients.
[[nodiscard]] bool delays_gradients(const GraphOptions& options);

/// A parameter whose gradient the backward graph makes, or the graph after it.
struct CallParameter {
  at::Tensor tensor;
  GradientPolicy policy = GradientPolicy::cloned;
  at::Tensor grad;                           ///< static; of an accumulated gradient OwnedGradient::memory
  at::Tensor attached = {};                  ///< of an accumulated gradient, see OwnedGradient
  std::optional<OutputStorage> memory = {};  ///< of an owned gradient: what is given out
  StorageView view = {};                     ///< of `memory`
  OutputSet outputs = all_outputs;           ///< the outputs that lead to it in autograd's graph
};

/// `has_gradient`: in the capture. Throws: CaptureError if the parameter has none there.
void require_gradient(const CallParameter& parameter, bool has_gradient);
/// The same, and throws a CaptureError for a sparse gradient.
void require_dense_gradient(const CallParameter& parameter, const at::Tensor& grad);

/// Inside the capture of the backward: an owned parameter's gradient keeps the memory that the graph writes, as long as the graph lives.
void give_memory(CallParameter& parameter);

/// After the capture of the last backward in memory of the sequence's own: no later graph could use the memory of `grads`, the gradients
/// of its `inputs`, which only the caller and autograd own. Gradients with storages of their own may be given out without a copy; a clone
/// would take the same bytes again. Returns true if there is such a gradient.
[[nodiscard]] bool give_input_gradients(std::vector<StaticInput>& inputs, const std::vector<at::Tensor>& grads);

// The rest of this file is for GradientPolicy::accumulated: a backward graph that adds into the `.grad` of parameters itself.

/// A `.grad` that the backward graph adds into, in the form that each replay checks. See are_in_place.
struct AccumulatedGradient {
  const c10::TensorImpl* parameter;
  const c10::TensorImpl* attached;  ///< CallParameter::attached: the `.grad` in nearly all replays
  const void* memory;               ///< where CallParameter::grad begins
};

/// A gradient that graphs add into.
struct OwnedGradient {
  at::Tensor attached;  ///< the `.grad` of the parameter; may be given other memory (`set_data`)
  at::Tensor memory;    ///< over the graphs' memory: no other code has this tensor
};

/// True if `grad` is a gradient in `memory`, and no view of it with other strides (`grad.t()`).
[[nodiscard]] bool is_part_of(const at::Tensor& grad, const at::Tensor& memory);

/// Puts the values of a `.grad` into the graphs' memory. The `.grad` is then dropped, and another stream may have made it.
void take_values(const at::Tensor& memory, const at::Tensor& grad);

/// `attached`. If it was given other memory, it is first put back into the graphs' `memory`.
const at::Tensor& in_graphs_memory(const at::Tensor& attached, const at::Tensor& memory);
inline const at::Tensor& to_attach(const OwnedGradient& gradient) {
  return in_graphs_memory(gradient.attached, gradient.memory);
}

/// The owned gradients of one engine. Captures that add into the gradient of the same parameter share it: microbatches in flight, or
/// other shapes. Holds weak references only. Threads: the step's.
class OwnedGradients {
 public:
  /// The gradient that graphs add into for `parameter`: the one of another capture, else its `.grad`, else new zeros. Attaches nothing,
  /// because a parameter has no `.grad` before a backward gives it one.
  /// Throws: UsageError if captures add into a gradient that was given other memory since.
  [[nodiscard]] OwnedGradient of(const at::Tensor& parameter);

  /// The current stream waits for the stream of the engine's latest whole step: all of them write the same gradients, replays and eager
  /// runs.
  void follow_latest_step(Runtime& runtime);

  /// Autograd finds the leaf that a backward names only while its accumulator lives, and no graph has an edge to these accumulators. So
  /// they are held here (see refuse_owned_gradients), but not in captures, which belong to other streams.
  void hold_accumulators();
  void release_accumulators() noexcept;
  /// After a parameter was given another shape: an accumulator checks gradients against the shape that it was made for.
  void renew_accumulators();

 private:
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Entry {
    WeakTensor parameter;  ///< keeps the address from being used again
    WeakTensor attached;
    WeakTensor memory;
    std::shared_ptr<torch::autograd::Node> accumulator;
  };
  std::unordered_map<const c10::TensorImpl*, Entry> entries_;
  std::optional<c10::Stream> step_on_;  ///< of the latest whole step
  std::optional<Event> mark_;           ///< recorded anew for each wait
};

/// True if the values of a `.grad` may be put into `memory`, because no other code could tell. A gradient that graphs attach is theirs,
/// even after it was given other memory.
[[nodiscard]] bool held_by_parameter_alone(const at::Tensor& grad, const at::Tensor& attached,
                                           const at::Tensor& memory);

/// True if `parameter` has hooks that fire when its gradient comes: a graph would not run them.
[[nodiscard]] bool has_gradient_hooks(const at::Tensor& parameter);

/// True if all of `gradients` lie where the graph adds into, none has a hook, and autograd adds on no other stream than `stream`. Then
/// check_owned_grads, attach_owned_grads and streams_that_add have nothing to do. One pass, without allocation: in nearly every replay
/// this is the only cost.
[[nodiscard]] bool are_in_place(const std::vector<AccumulatedGradient>& gradients, c10::Stream stream);

/// Before the backward of the call `name` queues anything. Throws: UsageError if the graph cannot do what plain training does.
void check_owned_grads(const std::string& name, const std::vector<CallParameter>& parameters);

/// Attaches the gradients that the graph adds into, for parameters that an output in `used` leads to. If a parameter has no `.grad`, the
/// gradient is zeroed and attached. If autograd has since put a `.grad` there, and no other code holds it, its values are taken.
void attach_owned_grads(std::vector<CallParameter>& parameters, OutputSet used);

/// Keeps the memory of `.grad`s that graphs own for `stream`, on which a backward adds into them. It is another stream's memory, if that
/// one was current at the capture. In plain training it would be the backward's stream's, and code there need not wait for others.
void keep_owned_grads_for(const std::vector<CallParameter>& parameters, c10::Stream stream);

/// The streams, other than `current`, on which autograd adds into the `.grad` that graphs own: it runs there what adds the gradients of
/// eager readers.
[[nodiscard]] Streams streams_that_add(const std::vector<CallParameter>& parameters, c10::Stream current);

/// For its lifetime, adds the gradient that a backward pass computes for a leaf into that leaf's target as soon as the gradient is
/// complete, and frees it. The caller of torch::autograd::grad gets no gradient for the leaf. So only one gradient is in memory at a
/// time, as if autograd accumulated.
///
/// The leaves must have no other hooks meanwhile (Sandbox::hide_hooks).  Threads: begins and ends on one; autograd's threads add.
class [[nodiscard]] AddedGradients {
 public:
  /// `targets`: one for each of `leaves`, which are distinct.
  AddedGradients(std::vector<at::Tensor> leaves, const std::vector<at::Tensor>& targets);
  AddedGradients(const AddedGradients&) = delete;
  AddedGradients& operator=(const AddedGradients&) = delete;
  ~AddedGradients();

  /// True if the leaf of that index got a gradient. Call it after the backward has ended.
  [[nodiscard]] bool has(std::size_t index) const noexcept { return added_[index] != 0; }

 private:
  std::vector<at::Tensor> leaves_;
  std::vector<char> added_;  // each written by one hook
};

}  // namespace sidestream
