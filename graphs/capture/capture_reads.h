#pragma once
#include <cstddef>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include "graphs/outputs/storage_holders.h"
#include "graphs/sequence/captured_call.h"
#include "observe/external_reads.h"
#include "observe/operator_observer.h"
#include "offload/exclusions.h"
#include "runtime/weak_storage_set.h"

namespace sidestream {

/// The memory that the captures of one sequence read and did not make, which must live as long as their graphs. Also the memory that they
/// made and that modules keep.
/// Threads: one at a time.
class CaptureReads {
 public:
  /// A storage that a forward capture made and that still lives.
  struct Made {
    std::size_t call;
    c10::Storage storage;
  };

  explicit CaptureReads(Exclusions& exclusions) : exclusions_(exclusions) {}

  /// Memory of the sequence itself, allocated without an operator of a capture.
  void made(const at::Tensor& tensor) { reads_.made(tensor); }
  void made(const c10::Storage& storage) { reads_.made(storage); }
  /// While the result lives, operators of this thread and of its backward passes are seen. Memory that they did not make is not
  /// offloaded.
  [[nodiscard]] OperatorObserverGuard watch();
  /// Gives `call` the memory that was read since the last call of this function, without its inputs, parameters and buffers. Returns the
  /// tensors that other modules of the model have registered, for example a rotary cache: they may be loaded or relocated too.
  /// Throws: CaptureError for memory of the device that no pass before has met.
  [[nodiscard]] std::vector<at::Tensor> give_to(CapturedCall& call);
  /// What the passes before the captures touched.
  [[nodiscard]] WeakStorageSet& met() noexcept { return met_; }
  /// Call after the captures of a call with capture-time hooks. `give_to` held its weights too, because the hooks may put them elsewhere.
  /// Releases those that lie where the graphs read them.
  static void release_registered(CapturedCall& call);
  /// Memory that lives now was made by earlier graphs: the forward that begins did not make it.
  void forward_begins() { belongs_to(kNoForward); }
  /// Memory that was made since `forward_begins` and lives now belongs to the forward of call `index`.
  void forward_ended(std::size_t index) { belongs_to(index); }
  /// The storages that the forwards made and others keep: outputs that unknown holders have, and all that `calls` do not have.
  [[nodiscard]] std::vector<Made> kept_by_others(const CapturedCalls& calls, const StorageHolders& holders) const;
  /// Memory that the captures write and did not make.
  [[nodiscard]] const std::vector<c10::Storage>& written() const noexcept { return written_; }

 private:
  static constexpr std::size_t kNoForward = static_cast<std::size_t>(-1);

  void before(const OperatorAccess& access);
  void belongs_to(std::size_t forward);

  Exclusions& exclusions_;
  ExternalReads reads_;
  WeakStorageSet met_;
  std::vector<c10::Storage> written_;
  std::unordered_map<const c10::StorageImpl*, std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>, std::size_t>>
      forwards_;  ///< of which call's forward it is
};

}  // namespace sidestream
