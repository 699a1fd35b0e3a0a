#pragma once
#include <cstddef>
#include <memory>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

namespace sidestream {

/// True for nodes that compute, and read, only what the gradients need that the pass asks for: LibTorch generates their code so. False for
/// generated nodes with one kernel for several gradients.
[[nodiscard]] bool computes_only_needed(const torch::autograd::Node& node);

/// A backward in two parts. The first computes the gradients of inputs, and keeps the gradients that arrive at the nodes where delayed
/// parameters join. The second runs from these nodes and computes the gradients of the delayed parameters alone.
///
/// The first part computes gradients of some delayed parameters as well: of those that join at several nodes, and of those that join at a
/// node that has hooks, or that computes all of its gradients or none. Otherwise the second part would compute gradients of inputs once
/// more.
/// Source: PyTorch's pipelining (stage_backward_input, stage_backward_weight); TransformerEngine's backward_dw.
class BackwardSplit {
 public:
  /// An empty one, with no parts.
  BackwardSplit() = default;
  /// The backward from `roots` to the leaves `first`, whose gradients the first part computes, and to the leaves `delayed`.
  BackwardSplit(torch::autograd::edge_list roots, std::vector<at::Tensor> first, std::vector<at::Tensor> delayed);

  /// Runs the first part on the current stream, and frees what the second part does not need of the autograd graph. `seeds`: one for each
  /// root. Returns the gradients of `first`, then of `delayed`; undefined if the second part computes it, and if there is none.
  [[nodiscard]] std::vector<at::Tensor> run_first(const std::vector<at::Tensor>& seeds);
  /// False if the first part computes everything.
  [[nodiscard]] bool has_second() const noexcept { return !joins_.empty(); }
  /// True if the second part computes the gradient of `delayed[index]`.
  [[nodiscard]] bool in_second(std::size_t index) const { return !in_first_[index]; }
  /// After `run_first`: runs the second part, and frees the autograd graph. Returns the gradients of `delayed`; undefined if the first
  /// part computes it.
  [[nodiscard]] std::vector<at::Tensor> run_second();

 private:
  class Cut;
  /// A node at which parameters join.
  struct Join {
    std::shared_ptr<torch::autograd::Node> node;
    std::vector<std::size_t> parameters;  ///< as indices into `delayed_`
    std::vector<at::Tensor> arriving;     ///< the gradients, by input of the node
  };

  torch::autograd::edge_list roots_;
  std::vector<at::Tensor> first_;
  std::vector<at::Tensor> delayed_;
  std::vector<Join> joins_;  ///< in the order in which a whole backward runs them
  std::vector<bool> in_first_;
  std::unordered_set<const torch::autograd::Node*> second_;  ///< nodes that the second part runs
};

/// Gradients on their way to `.grad`.
struct LeafGradients {
  std::vector<at::Tensor> leaves;
  std::vector<at::Tensor> grads;
};

/// Adds the gradients to the `.grad` of their leaves, in a backward pass of its own: hooks run as in any backward.
/// Ordering: the pass runs on the current stream.
void accumulate(LeafGradients gradients);

}  // namespace sidestream
