#include "offload/gradient_owner.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "offload/autograd_walk.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

std::atomic<int> owners{0};

}  // namespace

GradientOwner::GradientOwner() noexcept { owners.fetch_add(1, std::memory_order_relaxed); }
GradientOwner::~GradientOwner() { owners.fetch_sub(1, std::memory_order_relaxed); }

void refuse_owned_gradients(const torch::autograd::edge_list& roots, const torch::autograd::edge_list& wanted) {
  using torch::autograd::Node;
  if (owners.load(std::memory_order_relaxed) == 0) {
    return;
  }
  std::vector<at::Tensor> leaves;
  for (const torch::autograd::Edge& edge : wanted) {
    if (const at::Tensor* const leaf = leaf_of(edge.function.get()); leaf != nullptr) {
      leaves.push_back(*leaf);
    }
  }
  if (leaves.empty()) {
    return;
  }
  walk_autograd(nodes_of(roots), [&](const Node& node) {
    const auto* owner = dynamic_cast<const GradientOwner*>(&node);
    if (owner != nullptr && std::any_of(leaves.begin(), leaves.end(),
                                        [&](const at::Tensor& leaf) { return owner->owns_gradient_of(leaf); })) {
      throw UsageError(
          "autograd::grad, or backward with inputs, asks for the gradient of a parameter whose .grad belongs to a "
          "graph; the graph can only add into it. Capture with another GradientPolicy than accumulated for this "
          "parameter (GraphOptions::gradients)");
    }
  });
}

}  // namespace sidestream
