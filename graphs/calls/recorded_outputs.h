#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/ArrayRef.h>

#include "graphs/outputs/storage_holders.h"

namespace sidestream {

class EagerPlan;
class SavedTensorRecorder;

/// The storages that recorded calls returned, and who held them when the next call of the same sequence began. If no reference was left,
/// or only those of eager groups that will be offloaded, the graphs of the sequence may use the memory from that call on.
/// Threads: the step's.
class RecordedOutputs {
 public:
  /// Call `call` of the sequence `sequence` begins. `recorder`: of the step, null without one.
  void call_begins(std::size_t call, std::size_t sequence, const SavedTensorRecorder* recorder);
  /// Call `call` of the sequence `sequence` has run, perhaps again, and returned `outputs`.
  void add(std::size_t call, std::size_t sequence, c10::ArrayRef<at::Tensor> outputs);
  /// By output of `call`: true if in each run only groups that `plan` offloads held it when the next call began, or no code did.
  [[nodiscard]] std::vector<bool> released(std::size_t call, const EagerPlan& plan) const;
  /// Each storage that `call` returned, with the output that lies in it: `visit(storage, index)`.
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
    unknown,  ///< no call came after it
    none,
    groups,  ///< autograd alone, for groups that were being offloaded
    others,
  };
  struct Output {
    std::size_t call;
    std::size_t sequence;
    std::size_t index;
    WeakStorage storage;  ///< keeps the address from being used again
    Holder holder = Holder::unknown;
  };
  static Holder holder_of(const Output& output, const SavedTensorRecorder* recorder);

  std::vector<Output> outputs_;  ///< of all runs, in their order
};

}  // namespace sidestream
