#pragma once
#include <cstddef>
#include <memory>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

namespace torch::autograd {
struct Node;
}

namespace sidestream {

/// Which recorded calls later ones are computed from: seen by autograd's own edges, through whatever ran between them.
/// Threads: one at a time.
class CallDependencies {
 public:
  /// The recorded calls, in increasing order, that `inputs` were computed from, those before these included.
  [[nodiscard]] std::vector<std::size_t> of(c10::ArrayRef<at::Tensor> inputs) const;
  /// Call `call`, computed from `from`, has given `outputs`.
  void add(std::size_t call, std::vector<std::size_t> from, c10::ArrayRef<at::Tensor> outputs);
  void clear() noexcept;

 private:
  struct Giver {
    std::weak_ptr<torch::autograd::Node> alive;  ///< keeps the address from being met again
    std::size_t call;
  };
  std::unordered_map<const torch::autograd::Node*, Giver> givers_;
  std::unordered_map<std::size_t, std::vector<std::size_t>> from_;
};

}  // namespace sidestream
