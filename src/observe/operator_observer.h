#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>

#include "runtime/weak_storage_set.h"
#include "sidestream/export.h"

namespace sidestream {

/// What one operator touched, by its schema. Valid during the call that hands it over.
struct OperatorAccess {
  const char* name;                   ///< "aten::mm"; lives as long as the process
  c10::ArrayRef<at::Tensor> reads;    ///< arguments, those it also writes included; no undefined ones
  c10::ArrayRef<at::Tensor> writes;   ///< arguments that the schema marks as written
  c10::ArrayRef<at::Tensor> outputs;  ///< results; may alias arguments (views, in-place, out=)
  bool nested = false;                ///< ran inside another reported operator, which is reported later
  bool non_blocking = false;  ///< the argument of that name: a copy from or to pinned memory returns before it is done
  bool only_shape = false;    ///< changes what a tensor is, not its bytes (`unsqueeze_`, `set_`)
  std::optional<c10::Stream> stream{};  ///< an argument of that type (`record_stream`)
  bool random = false;                  ///< draws from a generator
  bool own_generator = false;           ///< which is given, and is not its device's default one
};

/// While it lives, `observe` is called after every operator of the calling thread, and of the backward passes that it
/// starts (autograd's device threads included; calls come one at a time). Operators inside operators are reported as well,
/// before the one they are in. Guards nest: the innermost observes, and those around it where it says so. Not for the replay
/// path.
///
/// `before`, if any, is called before each operator runs, with no outputs; nothing of the operator is written by then.
/// Schemas lie (`native_batch_norm` writes running statistics unmarked): what is known of that stands in unmarked_writes.h.
/// What the two throw does not stop the operator; it is kept for `rethrow`.
/// Threads: ends in any order and on any thread; what it stands in hears what comes after. Capture: legal.
class [[nodiscard]] OperatorObserverGuard {
 public:
  using Observe = std::function<void(const OperatorAccess&)>;
  /// Whether the guard that this one stands in hears of the same operators.
  enum class Outer : std::uint8_t { hears_nothing, hears_too };

  explicit OperatorObserverGuard(Observe observe, Observe before = {}, Outer outer = Outer::hears_nothing);
  OperatorObserverGuard(const OperatorObserverGuard&) = delete;
  OperatorObserverGuard& operator=(const OperatorObserverGuard&) = delete;
  /// No call of `observe` is running or starts after this.
  ~OperatorObserverGuard();

  /// Throws what `observe` or `before` threw first, if they did.
  void rethrow() const;
  /// True on a thread whose operators some guard observes now.
  [[nodiscard]] static bool observes_this_thread() noexcept;

  struct State;

 private:
  struct Registration;
  std::shared_ptr<State> state_;
  Registration* registration_;  ///< the thread's, from the guard's end on
};

/// For its lifetime operators of the calling thread are not reported: those that a backend's kernel is made of.
class [[nodiscard]] SIDESTREAM_API UnobservedGuard {
 public:
  UnobservedGuard() noexcept : before_(unobserved_) { unobserved_ = true; }
  UnobservedGuard(const UnobservedGuard&) = delete;
  UnobservedGuard& operator=(const UnobservedGuard&) = delete;
  ~UnobservedGuard() { unobserved_ = before_; }

  [[nodiscard]] static bool active() noexcept { return unobserved_; }

 private:
  bool before_;
  static thread_local constinit bool unobserved_;
};

/// A storage that was touched inside an observed region and not made there.
struct ExternalStorage {
  c10::Storage storage;        ///< keeps it alive
  const void* data = nullptr;  ///< its address when first seen: what a capture bakes in
  std::size_t bytes = 0;
  bool written = false;
};

/// Collects every storage that operators read or write and that no observed operator made: what a capture must keep alive.
/// A result that aliases an argument is not "made"; what a kernel allocates for itself and drops before the outermost
/// operator ends is none of ours. Threads: one at a time.
class ExternalReads {
 public:
  void observe(const OperatorAccess& access);
  /// Before the operator runs: what it reads and writes is known from here on.
  void observe_before(const OperatorAccess& access);
  /// Says that this tensor's storage counts as made inside (allocated by us, without an operator).
  void made(const at::Tensor& tensor);
  void made(const c10::Storage& storage);
  [[nodiscard]] bool has_made(const c10::StorageImpl* storage) const noexcept { return made_.contains(storage); }
  /// What was made and lives.
  [[nodiscard]] std::vector<c10::Storage> made_and_alive() const { return made_.alive(); }

  /// In the order they were first touched.
  [[nodiscard]] const std::vector<ExternalStorage>& externals() const noexcept { return externals_; }
  [[nodiscard]] const ExternalStorage* find(const c10::StorageImpl* storage) const noexcept;
  /// The externals so far, which are forgotten; what was made stays known.
  [[nodiscard]] std::vector<ExternalStorage> take();
  void clear() noexcept;

 private:
  // Seen inside an operator that has not ended; may still turn out to be that operator's own.
  struct Pending {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    bool written;
  };

  void touch(const at::Tensor& tensor, const OperatorAccess& access, bool written);
  void add(c10::Storage storage, bool written);
  void settle_pending();

  std::vector<ExternalStorage> externals_;
  std::unordered_map<const c10::StorageImpl*, std::size_t> index_;
  std::unordered_map<const c10::StorageImpl*, Pending> pending_;
  WeakStorageSet made_;
};

}  // namespace sidestream
