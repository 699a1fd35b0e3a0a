#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/intrusive_ptr.h>

namespace sidestream {

class EagerPlan;
class SavedTensorRecorder;

/// The storages that recorded calls gave, and who held them when the next call of the same sequence began. Where that was nobody, or
/// only eager groups that will be offloaded, the sequence need not keep the memory: its graphs may use it from that call on.
/// Threads: the step's.
class RecordedOutputs {
 public:
  /// Call `call` of the sequence `sequence` begins. `recorder`: of the step, null without one.
  void call_begins(std::size_t call, std::size_t sequence, const SavedTensorRecorder* recorder);
  /// Call `call` of the sequence `sequence` has run, once more maybe, and gave `outputs`.
  void add(std::size_t call, std::size_t sequence, c10::ArrayRef<at::Tensor> outputs);
  /// By output of `call`: true where in each of its runs nobody held it when the next call began, but for groups that `plan` offloads.
  [[nodiscard]] std::vector<bool> let_go(std::size_t call, const EagerPlan& plan) const;
  /// Each storage that `call` gave, with the output that lies in it: `visit(storage, index)`.
  template <class Visit>
  void for_each_of(std::size_t call, const Visit& visit) const {
    for (const Output& output : outputs_) {
      if (output.call == call) {
        visit(output.storage._unsafe_get_target(), output.index);
      }
    }
  }
  void clear() noexcept { outputs_.clear(); }

 private:
  /// Who held it.
  enum class Holder : std::uint8_t {
    unknown,  ///< no call came behind it
    nobody,
    groups,  ///< autograd alone, for groups that were being offloaded
    others,
  };
  struct Output {
    std::size_t call;
    std::size_t sequence;
    std::size_t index;
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  ///< keeps the address from being met again
    Holder holder = Holder::unknown;
  };
  static Holder holder_of(const Output& output, const SavedTensorRecorder* recorder);

  std::vector<Output> outputs_;  ///< of all runs, in their order
};

}  // namespace sidestream
