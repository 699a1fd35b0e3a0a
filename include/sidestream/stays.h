#pragma once
#include <memory>
#include <type_traits>
#include <utility>

#include <ATen/core/Tensor.h>

#include "sidestream/detail/argument_values.h"
#include "sidestream/detail/module_forward.h"

namespace sidestream {

/// Result of ss::stays(shared_ptr) and ss::outlives_engine. The function that is called gets it as a pointer.
template <class T>
class Stays {
 public:
  /// Does not own what `pointer` points to.
  explicit Stays(T* pointer) noexcept : pointer_(pointer) {}
  /// Shares the ownership.
  explicit Stays(std::shared_ptr<T> owner) noexcept : pointer_(owner.get()), owner_(std::move(owner)) {}
  /// The pointer.
  operator T*() const noexcept { return pointer_; }  // NOLINT: passed on as the pointer
  /// The pointer.
  T* operator->() const noexcept { return pointer_; }
  /// The pointer.
  [[nodiscard]] T* get() const noexcept { return pointer_; }

 private:
  T* pointer_;
  std::shared_ptr<T> owner_;  ///< null if the caller promises the lifetime
};

/// Result of ss::stays for a pointer to a tensor or to a value. The function that is called gets it as a pointer to const.
template <class T>
class StaysByValue {
 public:
  /// Does not own what `pointer` points to; a capture copies it.
  explicit StaysByValue(const T* pointer) noexcept : pointer_(pointer) {}
  /// The pointer.
  operator const T*() const noexcept { return pointer_; }  // NOLINT: passed on as the pointer
  /// The pointer.
  const T* operator->() const noexcept { return pointer_; }
  /// The pointer.
  [[nodiscard]] const T* get() const noexcept { return pointer_; }

 private:
  const T* pointer_;
};

/// Passes to ss::call a pointer to a tensor or to a value (of a type that could be an argument itself). A capture keeps the value and never
/// the pointer.
///
/// For a tensor, the capture keeps the same tensor, and each replay reads its bytes anew. Another tensor needs another capture.
/// `p` may be null, and may point to a local variable.
template <class T>
[[nodiscard]] auto stays(T* p) noexcept {
  using Value = std::remove_cv_t<T>;
  constexpr bool kept = std::is_same_v<Value, at::Tensor> || detail::is_value<Value>;
  static_assert(
      kept,
      "sidestream: ss::stays(pointer) keeps a copy of its target, but this type is neither a tensor nor a value. Pass "
      "a module as the module itself. List the members of a struct of tensors (sidestream::Members) and pass its "
      "pointer as it is. For any other target give ss::stays a std::shared_ptr, which a capture keeps, or write "
      "ss::outlives_engine(pointer), which promises that the target stays as it is and where it is");
  if constexpr (kept) {
    return StaysByValue<Value>(p);
  } else {
    return StaysByValue<at::Tensor>(nullptr);
  }
}

/// Passes to ss::call a pointer to the object that `owner` owns. A capture shares the ownership and compares by address.
/// The caller promises that the object does not change, except for the bytes of its tensors: a capture bakes in what it reads there.
template <class T>
[[nodiscard]] Stays<T> stays(std::shared_ptr<T> owner) noexcept {
  static_assert(!std::is_base_of_v<torch::nn::Module, T>,
                "sidestream: pass a module as an argument itself, so that its weights are watched");
  return Stays<T>(std::move(owner));
}

/// Passes a pointer to ss::call, which compares its address. The caller promises that the object lives at that address as long as the
/// engine. The caller also promises that the object does not change, except for the bytes of its tensors: a capture bakes in what it reads
/// there.
/// Never pass a local variable of the forward pass, because the capture runs when the next step begins.
template <class T>
[[nodiscard]] Stays<T> outlives_engine(T* p) noexcept {
  static_assert(!std::is_base_of_v<torch::nn::Module, T>,
                "sidestream: pass a module as an argument itself, so that its weights are watched");
  return Stays<T>(p);
}

}  // namespace sidestream
