#pragma once
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "sidestream/detail/argument_values.h"

namespace sidestream {

/// What ss::stays and ss::outlives_engine give: passed on as a pointer.
template <class T>
class Stays {
 public:
  explicit Stays(T* pointer) noexcept : pointer_(pointer) {}
  explicit Stays(std::shared_ptr<T> owner) noexcept : pointer_(owner.get()), owner_(std::move(owner)) {}
  operator T*() const noexcept { return pointer_; }  // NOLINT: passed on as the pointer
  T* operator->() const noexcept { return pointer_; }
  [[nodiscard]] T* get() const noexcept { return pointer_; }

 private:
  T* pointer_;
  std::shared_ptr<T> owner_;  ///< null where the caller promises the lifetime
};

/// What ss::stays gives for a pointer to a tensor or to a value: passed on as a pointer to const.
template <class T>
class StaysByValue {
 public:
  explicit StaysByValue(const T* pointer) noexcept : pointer_(pointer) {}
  operator const T*() const noexcept { return pointer_; }  // NOLINT: passed on as the pointer
  const T* operator->() const noexcept { return pointer_; }
  [[nodiscard]] const T* get() const noexcept { return pointer_; }

 private:
  const T* pointer_;
};

/// Passes on a pointer to a tensor or to a value (a type that could be an argument itself). A capture keeps the value, never the
/// pointer, and reads that: of a tensor, the same tensor, whose bytes are read anew by each replay; another tensor there is
/// another capture. `p` may be null, and may point to a local variable.
template <class T>
[[nodiscard]] auto stays(T* p) noexcept {
  using Value = std::remove_cv_t<T>;
  constexpr bool kept = std::is_same_v<Value, at::Tensor> || detail::is_value<Value>;
  static_assert(
      kept,
      "sidestream: ss::stays(pointer) keeps what it points to by value, and this type is none: list the members "
      "of a struct of tensors (sidestream::Members) and pass its pointer as it is, pass a module as the module "
      "itself, give ss::stays a std::shared_ptr, which a capture keeps, or write ss::outlives_engine(pointer), which "
      "promises that what it points to stays as it is and where it is");
  if constexpr (kept) {
    return StaysByValue<Value>(p);
  } else {
    return StaysByValue<at::Tensor>(nullptr);
  }
}

/// Passes on a pointer to what `owner` owns; a capture shares the ownership. It is compared by its address: the caller promises
/// that what is read there stays as it is (a capture bakes it in), but for the bytes of its tensors.
template <class T>
[[nodiscard]] Stays<T> stays(std::shared_ptr<T> owner) noexcept {
  static_assert(!std::is_base_of_v<torch::nn::Module, T>,
                "sidestream: pass a module as an argument itself, so that its weights are watched");
  return Stays<T>(std::move(owner));
}

/// Passes on a pointer, compared by its address. The caller promises that what it points to lives at that address for as long
/// as the engine, and stays as it is (a capture bakes it in), but for the bytes of its tensors. Never a local variable of the
/// forward pass: the capture runs at the begin of the next step.
template <class T>
[[nodiscard]] Stays<T> outlives_engine(T* p) noexcept {
  static_assert(!std::is_base_of_v<torch::nn::Module, T>,
                "sidestream: pass a module as an argument itself, so that its weights are watched");
  return Stays<T>(p);
}

}  // namespace sidestream
