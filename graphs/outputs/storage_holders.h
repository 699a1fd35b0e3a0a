#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include "offload/autograd_engine.h"
#include "runtime/weak_storage_set.h"

namespace sidestream {

struct SavedStorage;

// Whether memory may be used again depends on its holders. Some are known: graphs, recorders, samples. Others are not: autograd's nodes,
// members of a module, variables of the program. Only a reference count tells of them. All code in graphs/ that asks a count asks here.

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

/// True if the storage has another number of references than the `known` ones. More: an unknown holder has it. Fewer: what is known is
/// wrong. In both cases the memory stays as it is. For a tensor: the variables that have it. Other tensors may share its memory.
template <class Reference>
[[nodiscard]] bool others_hold(const Reference& to, std::size_t known) noexcept {
  return to.use_count() != known;
}

/// The references to one storage that known holders have. What several holders share counts once.
class KnownReferences {
 public:
  explicit KnownReferences(const c10::StorageImpl* to) noexcept : to_(to) {}

  [[nodiscard]] std::size_t count() const noexcept { return tensors_.size() + saved_.size() + storages_; }
  /// A tensor that a holder keeps, and the tensor that it is a view of.
  void add(const at::Tensor& tensor);
  /// A reference of a holder's own.
  void add(const c10::Storage& storage) noexcept { storages_ += storage.unsafeGetStorageImpl() == to_ ? 1 : 0; }
  void add(const SavedStorage& saved);

 private:
  const c10::StorageImpl* to_;
  std::unordered_set<const c10::TensorImpl*> tensors_;
  std::unordered_set<const SavedStorage*> saved_;
  std::size_t storages_ = 0;
};

/// The known holders of storages. Each registers once and says itself what it has. Threads: one at a time.
class StorageHolders {
 public:
  /// Adds all that the holder has now.
  using Holder = std::function<void(KnownReferences&)>;

  /// What `holder` refers to must outlive this object.
  void add(Holder holder) { holders_.push_back(std::move(holder)); }
  /// True unless all references to `storage` are those of registered holders.
  [[nodiscard]] bool others_hold(const c10::Storage& storage) const {
    return sidestream::others_hold(storage, known(storage.unsafeGetStorageImpl()));
  }
  [[nodiscard]] bool others_hold(const WeakStorage& storage) const {
    return sidestream::others_hold(storage, known(storage._unsafe_get_target()));
  }

 private:
  [[nodiscard]] std::size_t known(const c10::StorageImpl* storage) const;

  std::vector<Holder> holders_;
};

/// A source of saved-tensor hooks in front of another one. Notes which storages autograd saves, because a backward reads them.
/// Threads: the forward's.
class SavedStorages final : public SavedTensorSource {
 public:
  explicit SavedStorages(SavedTensorSource& inner) : inner_(inner) {}

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override;
  [[nodiscard]] bool contains(const at::Tensor& tensor) const noexcept;
  [[nodiscard]] bool contains(const c10::Storage& storage) const noexcept {
    return saved_.contains(storage.unsafeGetStorageImpl());
  }

 private:
  class Hooks;
  SavedTensorSource& inner_;
  WeakStorageSet saved_;
};

/// Waits until autograd's device thread has freed the last tensors of the backward passes that have returned. The thread does so shortly
/// after the pass returns, and before it begins another one; so a small pass is run here. Returns at once if autograd's multithreading
/// is switched off, because the calling thread runs backwards then.
/// Capture: legal; it runs no kernel and takes no memory.
void await_end_of_backward(c10::Device device);

}  // namespace sidestream
