#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include "offload/gradient_owner.h"
#include "sidestream/detail/argument_parts.h"

namespace sidestream {

struct CapturedCall;
class GraphSequence;

/// The autograd node of one graphed call: its apply replays the backward graph. When it dies unused, so does the claim on the
/// call's saved tensors.
class ReplayNode final : public torch::autograd::Node, public GradientOwner {
 public:
  /// A hook in front of this node that keeps nothing of what it sees: gradients that another replay hands on may be static, and
  /// are copied for others.
  class KeepsNoGradient : public torch::autograd::FunctionPreHook {};

  ReplayNode(std::shared_ptr<GraphSequence> sequence, std::size_t call, std::uint64_t generation)
      : sequence_(std::move(sequence)), call_(call), generation_(generation) {}
  ~ReplayNode() override;

  /// Makes the node of the forward of `call` that was just launched on the stream `current`, and the outputs that require a gradient its
  /// results. Notes which gradients of inputs the backward will hand on without a copy.
  static void attach(std::shared_ptr<GraphSequence> sequence, std::size_t index, CapturedCall& call,
                     c10::Stream current, c10::ArrayRef<at::Tensor> inputs, detail::TensorBuffer& outputs);

  /// True if autograd connects `tensors` to a call of `sequence` that awaits its backward. Walks autograd's graph, and allocates.
  [[nodiscard]] static bool connects(c10::ArrayRef<at::Tensor> tensors, const GraphSequence& sequence);

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
  void release_variables() override {}
  [[nodiscard]] std::string name() const override { return "SidestreamReplay"; }
  [[nodiscard]] bool owns_gradient_of(const at::Tensor& leaf) const override;

 private:
  void refuse_named_gradients() const;
  /// Whether a node after this one lets the caller of the backward() wait for it.
  [[nodiscard]] bool leads_to_a_leaf(const torch::autograd::variable_list& results) const;
  std::shared_ptr<GraphSequence> sequence_;
  std::size_t call_;
  std::uint64_t generation_;
  std::size_t of_inputs_ = 0;  ///< edges that lead to inputs; those to parameters follow
  bool applied_ = false;
};

}  // namespace sidestream
