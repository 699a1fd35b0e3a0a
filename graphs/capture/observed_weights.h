#pragma once
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include "observe/external_reads.h"
#include "observe/operator_observer.h"

namespace sidestream {

/// Watches one eager pass of a call for what its weights mean to a capture: which tensors from outside its backward reads,
/// and whether it reads one that was computed outside from other weights.
/// Threads: one at a time, as observers are called.
class ObservedWeights {
 public:
  /// Just before the pass. `externals`: observes the same pass, before this one. Must outlive this object.
  explicit ObservedWeights(const ExternalReads& externals);
  /// Throws: UsageError where the operator reads a weight that is no leaf and was made before the pass, or a sparse tensor from outside.
  void observe(const OperatorAccess& access);
  /// The forward has ended.
  void backward_begins() noexcept { in_backward_ = true; }
  /// A leaf that the pass has made for itself is one of its own, not a weight.
  [[nodiscard]] bool made_inside(const at::Tensor& tensor) const {
    return made_.count(tensor.unsafeGetTensorImpl()) != 0;
  }
  /// Tensors from outside that backward has read, by storage.
  template <class Visit>
  void for_each_read(const Visit& visit) const {
    for (const auto& [storage, versions] : versions_) {
      if (read_in_backward_.count(storage) != 0) {
        for (const c10::VariableVersion& version : versions) {
          visit(storage, version);
        }
      }
    }
  }

 private:
  /// Of a tensor that is no leaf.
  [[nodiscard]] bool made_outside(const at::Tensor& tensor);
  /// Notes by which node the pass has made the tensor.
  void note_node(const at::Tensor& made);
  void refuse_sparse(const at::Tensor& read) const;

  const ExternalReads& externals_;
  std::uint64_t first_node_;  ///< sequence number of this thread's first node of the pass
  std::uint64_t thread_ = at::RecordFunction::currentThreadId();  ///< each thread numbers its own nodes
  bool in_backward_ = false;
  std::unordered_map<const c10::TensorImpl*, c10::weak_intrusive_ptr<c10::TensorImpl>> made_;
  std::unordered_map<const torch::autograd::Node*, std::weak_ptr<torch::autograd::Node>> nodes_;
  std::unordered_map<const c10::StorageImpl*, std::vector<c10::VariableVersion>> versions_;
  std::unordered_set<const c10::StorageImpl*> read_in_backward_;
};

}  // namespace sidestream
