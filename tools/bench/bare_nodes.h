#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

namespace sidestream::bench {

/// A chain of autograd nodes with the edges that a sequence of graphed layers has: what autograd alone takes, and with `queue` what the
/// bare calls take on the threads that replays make them on.
class BareNodes {
 public:
  /// Queues the calls of a layer's forward or backward.
  using Queue = std::function<void(std::size_t layer, bool backward)>;

  /// `given`: to these of each layer's parameters its node gives gradients, or copies of them. `queue`: empty queues nothing.
  BareNodes(std::vector<std::vector<at::Tensor>> given, bool clones, at::Tensor gradient, Queue queue = {})
      : given_(std::move(given)), clones_(clones), gradient_(std::move(gradient)), queue_(std::move(queue)) {}

  [[nodiscard]] at::Tensor forward(const at::Tensor& x) const {
    at::Tensor h = x;
    for (std::size_t layer = 0; layer < given_.size(); ++layer) {
      const std::vector<at::Tensor>& parameters = given_[layer];
      if (queue_) {
        queue_(layer, /*backward=*/false);
      }
      auto node = std::make_shared<Node>(*this, layer);
      torch::autograd::edge_list edges;
      edges.reserve(parameters.size() + 1);
      edges.push_back(torch::autograd::impl::gradient_edge(h));
      for (const at::Tensor& parameter : parameters) {
        edges.push_back(torch::autograd::impl::gradient_edge(parameter));
      }
      node->set_next_edges(std::move(edges));
      at::Tensor next = h.detach();
      torch::autograd::set_history(next, node);
      h = std::move(next);
    }
    return h;
  }

 private:
  class Node final : public torch::autograd::Node {
   public:
    Node(const BareNodes& chain, std::size_t layer) : chain_(chain), layer_(layer) {}
    torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
      if (chain_.queue_) {
        chain_.queue_(layer_, /*backward=*/true);
      }
      torch::autograd::variable_list results = std::move(grads);
      results.reserve(num_outputs());
      for (std::size_t i = 1; i < num_outputs(); ++i) {
        results.push_back(chain_.clones_ ? chain_.gradient_.clone() : chain_.gradient_.detach());
      }
      return results;
    }
    void release_variables() override {}
    [[nodiscard]] std::string name() const override { return "BareNode"; }

   private:
    const BareNodes& chain_;
    std::size_t layer_;
  };

  std::vector<std::vector<at::Tensor>> given_;
  bool clones_;
  at::Tensor gradient_;
  Queue queue_;
};

}  // namespace sidestream::bench
