#pragma once
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "graphs/sandbox/written_storages.h"
#include "observe/operator_observer.h"
#include "runtime/weak_storage_set.h"

namespace sidestream {

/// What is run while it lives leaves no trace on tensors that were there before, nor on the default generators of the device and
/// of the CPU, nor on those that are named: all that operators write is copied before the first write, and put back at the end. Version counters stay as the
/// run left them, so that what autograd saved in it may still be read.
///
/// Backward passes that are started while it lives are covered as well.
/// Ordering: copies on the current stream.  Capture: illegal.  Threads: ends on the thread it began on.
class [[nodiscard]] EffectsUndone {
 public:
  /// `buffers` are copied at once: an operator whose schema does not say so may write them.
  EffectsUndone(c10::Device device, const std::vector<at::Tensor>& buffers,
                const std::vector<at::Generator>& generators = {});
  EffectsUndone(const EffectsUndone&) = delete;
  EffectsUndone& operator=(const EffectsUndone&) = delete;
  ~EffectsUndone();

  /// Throws what kept a tensor from being copied, if something did.
  void check() const { observer_.rethrow(); }

 private:
  void before(const OperatorAccess& access);
  void after(const OperatorAccess& access);

  struct Drawn {
    at::Generator generator;
    at::Tensor before;  ///< its state
  };

  std::vector<Drawn> drawn_;
  WrittenStorages written_;
  WeakStorageSet made_;
  bool temporaries_ = false;        ///< what was kept may be a kernel's own
  OperatorObserverGuard observer_;  // last: it calls into the others
};

}  // namespace sidestream
