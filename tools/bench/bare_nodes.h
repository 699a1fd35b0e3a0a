#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

namespace sidestream::bench {

/// A chain of autograd nodes with the edges that a chain of graphed layers has, which launch nothing: what autograd alone takes.
class BareNodes {
 public:
  /// `given`: to these of each layer's parameters its node gives gradients, or copies of them.
  BareNodes(std::vector<std::vector<at::Tensor>> given, bool clones, at::Tensor gradient)
      : given_(std::move(given)), clones_(clones), gradient_(std::move(gradient)) {}

  [[nodiscard]] at::Tensor forward(const at::Tensor& x) const {
    at::Tensor h = x;
    for (const std::vector<at::Tensor>& parameters : given_) {
      auto node = std::make_shared<Node>(*this);
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
    explicit Node(const BareNodes& chain) : chain_(chain) {}
    torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
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
  };

  std::vector<std::vector<at::Tensor>> given_;
  bool clones_;
  at::Tensor gradient_;
};

}  // namespace sidestream::bench
