#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>

#include "sidestream/detail/export.h"

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
  const at::Generator* own_generator =
      nullptr;  ///< the given generator if it is not its device's default one; else null
};

/// For its lifetime, `observe` is called after every operator of the calling thread, and of the backward passes that the thread starts
/// (autograd's device threads included; calls come one at a time). Operators inside of operators are reported as well, before the outer
/// one. Guards nest: the innermost observes, and outer ones observe too if it says so. Not for the replay path.
///
/// `before`, if any, is called before each operator runs, with no outputs; nothing of the operator is written by then. Schemas are
/// sometimes wrong (`native_batch_norm` writes running statistics unmarked): unmarked_writes.h lists the known cases. Exceptions of the
/// two functions do not stop the operator; they are kept for `rethrow`.
/// Threads: ends in any order and on any thread; the outer guard observes what follows. Capture: legal.
class [[nodiscard]] OperatorObserverGuard {
 public:
  using Observe = std::function<void(const OperatorAccess&)>;
  /// Whether the outer guard observes the same operators too.
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

}  // namespace sidestream
