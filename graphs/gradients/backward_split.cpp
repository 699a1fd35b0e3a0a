#include "graphs/gradients/backward_split.h"

#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <string_view>
#include <typeinfo>
#include <unordered_map>
#include <utility>

#include <c10/util/Type.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include "offload/autograd_walk.h"

namespace sidestream {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

/// Every node that `roots` lead to, each after the nodes that it leads to.
std::vector<std::shared_ptr<Node>> leaves_first(const edge_list& roots) {
  struct Open {
    std::shared_ptr<Node> node;
    std::size_t next = 0;
  };
  std::vector<std::shared_ptr<Node>> order;
  std::set<const Node*> seen;
  std::vector<Open> open;
  for (const Edge& root : roots) {
    if (seen.insert(root.function.get()).second) {
      open.push_back({root.function});
    }
    while (!open.empty()) {
      Open& top = open.back();
      if (top.next == top.node->num_outputs()) {
        order.push_back(std::move(top.node));
        open.pop_back();
        continue;
      }
      const Edge edge = top.node->next_edge(top.next++);
      if (edge.is_valid() && seen.insert(edge.function.get()).second) {
        open.push_back({edge.function});
      }
    }
  }
  return order;
}

std::vector<at::Tensor> execute(const edge_list& from, const std::vector<at::Tensor>& seeds, const edge_list& to,
                                bool keep_graph) {
  return torch::autograd::Engine::get_default_engine().execute(from, seeds, keep_graph, /*create_graph=*/false,
                                                               /*accumulate_grad=*/false, to);
}

/// Generated nodes whose one kernel computes all gradients, or nearly all, whichever the pass asks for.
/// Source: LibTorch 2.11, tools/autograd/derivatives.yaml: formulas of several inputs that get no `grad_input_mask`. The kernels of the
/// last six get the mask and follow a part of it at most.
constexpr std::array kJoint{
    std::string_view("ConvTbcBackward0"),
    std::string_view("CudnnAttentionBackward0"),
    std::string_view("CudnnGridSamplerBackward0"),
    std::string_view("EfficientAttentionBackward0"),
    std::string_view("EuclideanDistBackward0"),
    std::string_view("FakeQuantizeLearnablePerChannelAffineBackward0"),
    std::string_view("FakeQuantizeLearnablePerTensorAffineBackward0"),
    std::string_view("FlashAttentionBackward0"),
    std::string_view("GridSampler2DCpuFallbackBackward0"),
    std::string_view("IndexReduceBackward0"),
    std::string_view("LinalgHouseholderProductBackward0"),
    std::string_view("MkldnnRnnLayerBackward0"),
    std::string_view("PolarBackward0"),
    std::string_view("PreluKernelBackward0"),
    std::string_view("ScaledDotProductCudnnAttentionBackward0"),
    std::string_view("ScaledDotProductFlashAttentionBackward0"),
    std::string_view("ScaledDotProductFlashAttentionForCpuBackward0"),
    std::string_view("ScatterReduceBackward0"),
    std::string_view("ThnnFusedGruCellBackward0"),
    std::string_view("ThnnFusedLstmCellBackward0"),
    std::string_view("WeightNormInterfaceBackward0"),
    std::string_view("CudnnBatchNormBackward0"),
    std::string_view("CudnnRnnBackward0"),
    std::string_view("GridSampler2DBackward0"),
    std::string_view("GridSampler3DBackward0"),
    std::string_view("ScaledDotProductEfficientAttentionBackward0"),
    std::string_view("ScaledDotProductFusedAttentionOverrideableBackward0"),
};

/// Hands gradients on that were computed before.
class HandOn final : public Node {
 public:
  /// For the stream of `grads`, the current one. They are not empty.
  explicit HandOn(std::vector<at::Tensor> grads) : grads_(std::move(grads)) { add_input_metadata(grads_.front()); }
  variable_list apply(variable_list&& /*nothing*/) override { return std::move(grads_); }
  [[nodiscard]] std::string name() const override { return "SidestreamWeightGradients"; }

 private:
  std::vector<at::Tensor> grads_;
};

}  // namespace

bool computes_only_needed(const Node& node) {
  constexpr std::string_view kGenerated = "torch::autograd::generated::";
  const std::string type = c10::demangle(typeid(node).name());
  if (type.rfind(kGenerated, 0) != 0) {
    return false;
  }
  const std::string_view name = std::string_view(type).substr(kGenerated.size());
  return std::find(kJoint.begin(), kJoint.end(), name) == kJoint.end();
}

class BackwardSplit::Cut {
 public:
  explicit Cut(BackwardSplit& split) : split_(split), order_(leaves_first(split.roots_)) {
    for (const at::Tensor& leaf : split.first_) {
      first_.insert(leaf.unsafeGetTensorImpl());
    }
    for (const at::Tensor& leaf : split.delayed_) {
      delayed_.push_back(leaf.unsafeGetTensorImpl());
    }
    split_.in_first_.resize(delayed_.size());
  }

  void make() {
    while (!find_joins()) {
    }
    // A whole backward runs the node that was made last first.
    std::sort(split_.joins_.begin(), split_.joins_.end(),
              [](const auto& a, const auto& b) { return a.node->sequence_nr() > b.node->sequence_nr(); });
  }

 private:
  /// What a node leads to.
  struct Reach {
    bool first = false;                ///< a gradient of the first part
    std::set<std::size_t> parameters;  ///< on paths that the first part does not run
  };

  /// False if parameters were found that must be in the first part: the joins are other ones then.
  bool find_joins() {
    split_.joins_.clear();
    split_.second_.clear();
    std::unordered_map<const Node*, Reach> reach;
    std::vector<std::size_t> times(delayed_.size());
    std::set<std::size_t> whole;  // join at a node that computes all gradients
    for (const auto& node : order_) {
      Reach& own = reach[node.get()];
      if (const at::Tensor* const variable = leaf_of(node.get()); variable != nullptr) {
        const c10::TensorImpl* const leaf = variable->unsafeGetTensorImpl();
        const auto found = std::find(delayed_.begin(), delayed_.end(), leaf);
        const auto index = static_cast<std::size_t>(found - delayed_.begin());
        const bool late = found != delayed_.end() && !split_.in_first_[index];
        own.first = first_.count(leaf) > 0 || (found != delayed_.end() && !late);
        if (late) {
          own.parameters.insert(index);
          split_.second_.insert(node.get());
        }
        continue;
      }
      std::set<std::size_t> joining;
      for (const Edge& edge : node->next_edges()) {
        if (edge.is_valid()) {
          const Reach& next = reach[edge.function.get()];
          own.first = own.first || next.first;
          if (!next.first) {
            joining.insert(next.parameters.begin(), next.parameters.end());
          }
        }
      }
      if (!own.first) {
        own.parameters = std::move(joining);
        if (!own.parameters.empty()) {
          split_.second_.insert(node.get());
        }
        continue;
      }
      add_join(node, joining, times);
      if (!computes_only_needed(*node) || has_hooks(*node)) {  // both parts would run the hooks
        whole.insert(joining.begin(), joining.end());
      }
    }
    std::set<const Node*> roots;
    for (const Edge& root : split_.roots_) {  // from which the first part computes nothing
      if (const Reach& own = reach[root.function.get()]; !own.first && roots.insert(root.function.get()).second) {
        add_join(root.function, own.parameters, times);
        if (has_hooks(*root.function)) {
          whole.insert(own.parameters.begin(), own.parameters.end());
        }
      }
    }
    bool done = true;
    for (const auto i : c10::irange(delayed_.size())) {
      if (!split_.in_first_[i] && (times[i] != 1 || whole.count(i) > 0)) {
        split_.in_first_[i] = true;
        done = false;
      }
    }
    return done;
  }

  void add_join(const std::shared_ptr<Node>& node, const std::set<std::size_t>& joining,
                std::vector<std::size_t>& times) {
    if (joining.empty()) {
      return;
    }
    split_.joins_.push_back({node, {joining.begin(), joining.end()}, {}});
    split_.second_.insert(node.get());
    for (const std::size_t parameter : joining) {
      ++times[parameter];
    }
  }

  BackwardSplit& split_;
  std::vector<std::shared_ptr<Node>> order_;
  std::set<const c10::TensorImpl*> first_;
  std::vector<const c10::TensorImpl*> delayed_;
};

BackwardSplit::BackwardSplit(edge_list roots, std::vector<at::Tensor> first, std::vector<at::Tensor> delayed)
    : roots_(std::move(roots)), first_(std::move(first)), delayed_(std::move(delayed)) {
  Cut(*this).make();
}

std::vector<at::Tensor> BackwardSplit::run_first(const std::vector<at::Tensor>& seeds) {
  edge_list to = torch::autograd::collect_next_edges(first_);
  for (const auto i : c10::irange(delayed_.size())) {
    if (in_first_[i]) {
      to.push_back(torch::autograd::impl::gradient_edge(delayed_[i]));
    }
  }
  std::size_t next = to.size();
  for (const Join& join : joins_) {
    for (const auto input : c10::irange(join.node->num_inputs())) {
      to.emplace_back(join.node, input);
    }
  }
  std::vector<at::Tensor> made;
  if (!to.empty()) {
    made = execute(roots_, seeds, to, /*keep_graph=*/true);
  }
  for (Join& join : joins_) {
    const auto begin = made.begin() + static_cast<std::ptrdiff_t>(next);
    join.arriving.assign(begin, begin + join.node->num_inputs());
    next += join.node->num_inputs();
  }
  walk_autograd(nodes_of(roots_), [&](Node& node) {
    if (second_.count(&node) == 0) {
      node.release_variables();
    }
  });
  std::vector<at::Tensor> grads(made.begin(), made.begin() + static_cast<std::ptrdiff_t>(first_.size()));
  next = first_.size();
  for (const auto i : c10::irange(delayed_.size())) {
    grads.push_back(in_first_[i] ? made[next++] : at::Tensor());
  }
  return grads;
}

std::vector<at::Tensor> BackwardSplit::run_second() {
  std::vector<at::Tensor> grads(delayed_.size());
  for (Join& join : joins_) {
    edge_list from;
    std::vector<at::Tensor> seeds;
    for (const auto input : c10::irange(join.arriving.size())) {
      if (join.arriving[input].defined()) {
        from.emplace_back(join.node, input);
        seeds.push_back(join.arriving[input]);
      }
    }
    std::vector<at::Tensor> leaves;
    for (const std::size_t parameter : join.parameters) {
      leaves.push_back(delayed_[parameter]);
    }
    if (!from.empty()) {
      std::vector<at::Tensor> made =
          execute(from, seeds, torch::autograd::collect_next_edges(leaves), /*keep_graph=*/false);
      for (const auto i : c10::irange(made.size())) {
        grads[join.parameters[i]] = std::move(made[i]);
      }
    }
  }
  return grads;
}

void accumulate(LeafGradients gradients) {
  if (gradients.leaves.empty()) {
    return;
  }
  edge_list edges = torch::autograd::collect_next_edges(gradients.leaves);
  // The engine asks for a gradient. A reference to one of these would cost a copy.
  const at::Tensor any = gradients.grads.front().detach();
  const auto node = std::make_shared<HandOn>(std::move(gradients.grads));
  node->set_next_edges(std::move(edges));
  (void)torch::autograd::Engine::get_default_engine().execute({Edge(node, 0)}, {any}, /*keep_graph=*/false,
                                                              /*create_graph=*/false, /*accumulate_grad=*/true);
}

}  // namespace sidestream
