#include "graphs/sandbox/leaf_guards.h"

#include <algorithm>
#include <memory>
#include <utility>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

namespace sidestream {

struct LeafHookGuard::Saved {
  at::Tensor leaf;  // keeps `meta` alive
  torch::autograd::AutogradMeta* meta;
  std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>> hooks;
  std::weak_ptr<torch::autograd::Node> accumulator;
};

LeafHookGuard::LeafHookGuard(const std::vector<at::Tensor>& leaves, bool hooks_only) : hooks_only_(hooks_only) {
  for (const at::Tensor& leaf : leaves) {
    const bool known =
        std::any_of(saved_.begin(), saved_.end(), [&](const Saved& saved) { return saved.leaf.is_same(leaf); });
    if (auto* meta = torch::autograd::impl::get_autograd_meta(leaf); meta != nullptr && !known) {
      Saved saved{leaf, meta, {}, {}};
      std::swap(meta->hooks_, saved.hooks);
      if (!hooks_only_) {
        std::swap(meta->grad_accumulator_, saved.accumulator);
      }
      saved_.push_back(std::move(saved));
    }
  }
}

LeafHookGuard::~LeafHookGuard() {
  for (Saved& saved : saved_) {
    std::swap(saved.meta->hooks_, saved.hooks);
    if (!hooks_only_) {
      saved.meta->grad_accumulator_ = std::move(saved.accumulator);
    }
  }
}

}  // namespace sidestream
