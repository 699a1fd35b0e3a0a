#pragma once
#include <cstddef>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include "observe/operator_observer.h"
#include "runtime/weak_storage_set.h"

namespace sidestream {

/// Bytes of a storage, from `begin` to before `end`.
struct ByteRange {
  std::size_t begin = 0;
  std::size_t end = 0;

  [[nodiscard]] bool contains(const ByteRange& other) const noexcept {
    return begin <= other.begin && other.end <= end;
  }
  [[nodiscard]] bool overlaps(const ByteRange& other) const noexcept { return begin < other.end && other.begin < end; }
};
/// From the first to the last element of a tensor with strides.
[[nodiscard]] ByteRange bytes_in_storage(const at::Tensor& tensor);
/// True if an element of one lies in the bytes that the other spans. Parts of one buffer share its storage, but no memory.
[[nodiscard]] bool share_memory(const at::Tensor& a, const at::Tensor& b);

/// A storage that was touched inside an observed region and not made there.
struct ExternalStorage {
  c10::Storage storage;  ///< keeps it alive
  std::size_t bytes = 0;
  bool written = false;
  c10::SmallVector<ByteRange, 1> parts;  ///< what of it was touched
};

/// Collects every storage that operators read or write and that no observed operator made: what a capture must keep alive.
/// A result that aliases an argument is not "made"; what a kernel allocates for itself and drops before the outermost
/// operator ends is none of ours. Of sparse, nested and quantised tensors it collects the storages of their parts. Threads: one at a time.
class ExternalReads {
 public:
  void observe(const OperatorAccess& access);
  /// Before the operator runs: what it reads and writes is known from here on.
  void observe_before(const OperatorAccess& access);
  /// Says that this tensor's storage counts as made inside (allocated by us, without an operator).
  void made(const at::Tensor& tensor);
  void made(const c10::Storage& storage);
  [[nodiscard]] bool has_made(const c10::StorageImpl* storage) const noexcept { return made_.contains(storage); }
  /// Storages that were made and are alive.
  [[nodiscard]] std::vector<c10::Storage> made_and_alive() const { return made_.alive(); }

  /// In the order they were first touched.
  [[nodiscard]] const std::vector<ExternalStorage>& externals() const noexcept { return externals_; }
  [[nodiscard]] const ExternalStorage* find(const c10::StorageImpl* storage) const noexcept;
  /// The externals so far, which are forgotten; what was made stays known.
  [[nodiscard]] std::vector<ExternalStorage> take();

 private:
  // Seen inside an operator that has not ended; may still turn out to be that operator's own.
  struct Pending {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    bool written;
    c10::SmallVector<ByteRange, 1> parts;
  };

  void touch(const at::Tensor& tensor, const OperatorAccess& access, bool written);
  void touch_part(const at::Tensor& tensor, const OperatorAccess& access, bool written);
  void add(c10::Storage storage, bool written, c10::ArrayRef<ByteRange> parts);
  void settle_pending();

  std::vector<ExternalStorage> externals_;
  std::unordered_map<const c10::StorageImpl*, std::size_t> index_;
  std::unordered_map<const c10::StorageImpl*, Pending> pending_;
  WeakStorageSet made_;
};

}  // namespace sidestream
