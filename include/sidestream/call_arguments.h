#pragma once
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

namespace sidestream {

/// A pointer whose target stays where it is for as long as captures that use it live.
template <class T>
struct Stays {
  T* pointer;
  operator T*() const noexcept { return pointer; }  // NOLINT: passed on as the pointer
  bool operator==(const Stays& other) const noexcept { return pointer == other.pointer; }
};

/// Says that what `pointer` points to stays: a captured call bakes in what it read there.
template <class T>
[[nodiscard]] Stays<T> stays(T* pointer) noexcept {
  return {pointer};
}

/// What `ss::call` is made of. Of no use to a trainer, and it may change at any time.
namespace detail {

using TensorBuffer = c10::SmallVector<at::Tensor, 8>;

/// An argument that is not a tensor, by reference: compared with what a capture holds, copied only when captured.
struct Guard {
  const void* value;
  const std::type_info* type;
  bool (*equal)(const void*, const void*);
  std::shared_ptr<const void> (*copy)(const void*);
};
using GuardBuffer = c10::SmallVector<Guard, 8>;

template <class T>
Guard make_guard(const T& value) {
  return {&value, &typeid(T),
          [](const void* a, const void* b) { return *static_cast<const T*>(a) == *static_cast<const T*>(b); },
          [](const void* v) -> std::shared_ptr<const void> {
            return std::make_shared<const T>(*static_cast<const T*>(v));
          }};
}

/// The sizes of vectors and which optionals are set: guards too, held by value while a call is taken apart.
using ShapeBuffer = c10::SmallVector<std::size_t, 8>;

/// How one argument type is taken apart into tensors and guards, and put together again from tensors alone.
/// The general case: a value that is compared.
template <class T, class = void>
struct Argument {
  static_assert(!std::is_pointer_v<T>, "wrap pointer arguments in ss::stays(p): it says that what p points to stays");
  static void flatten(const T& value, TensorBuffer& /*tensors*/, GuardBuffer& guards, ShapeBuffer& /*shape*/) {
    guards.push_back(make_guard(value));
  }
  static T stripped(const T& value) { return value; }
  static const T& rebuild(const T& prototype, const at::Tensor*& /*next*/) { return prototype; }
};

template <>
struct Argument<at::Tensor> {
  static void flatten(const at::Tensor& value, TensorBuffer& tensors, GuardBuffer& /*guards*/, ShapeBuffer& /*shape*/) {
    tensors.push_back(value);
  }
  static at::Tensor stripped(const at::Tensor& /*value*/) { return {}; }
  static at::Tensor rebuild(const at::Tensor& /*prototype*/, const at::Tensor*& next) { return *next++; }
};

template <>
struct Argument<std::optional<at::Tensor>> {
  using T = std::optional<at::Tensor>;
  static void flatten(const T& value, TensorBuffer& tensors, GuardBuffer& /*guards*/, ShapeBuffer& shape) {
    shape.push_back(value.has_value() ? 1 : 0);
    if (value) {
      tensors.push_back(*value);
    }
  }
  static T stripped(const T& value) { return value ? T(at::Tensor()) : T(); }
  static T rebuild(const T& prototype, const at::Tensor*& next) { return prototype ? T(*next++) : T(); }
};

template <>
struct Argument<std::vector<at::Tensor>> {
  using T = std::vector<at::Tensor>;
  static void flatten(const T& value, TensorBuffer& tensors, GuardBuffer& /*guards*/, ShapeBuffer& shape) {
    shape.push_back(value.size());
    tensors.append(value.begin(), value.end());
  }
  static T stripped(const T& value) { return T(value.size()); }
  static T rebuild(const T& prototype, const at::Tensor*& next) {
    T result(next, next + prototype.size());
    next += prototype.size();
    return result;
  }
};

/// String literals are compared by content.
template <>
struct Argument<const char*> {
  using T = const char*;
  static void flatten(const T& value, TensorBuffer& /*tensors*/, GuardBuffer& guards, ShapeBuffer& /*shape*/) {
    guards.push_back({&value, &typeid(T),
                      [](const void* a, const void* b) {
                        return std::string(*static_cast<const T*>(a)) == *static_cast<const T*>(b);
                      },
                      [](const void* v) -> std::shared_ptr<const void> {
                        auto text = std::make_shared<std::pair<std::string, T>>(*static_cast<const T*>(v), nullptr);
                        text->second = text->first.c_str();
                        return {text, &text->second};
                      }});
  }
  static T stripped(const T& value) { return value; }
  static T rebuild(const T& prototype, const at::Tensor*& /*next*/) { return prototype; }
};

/// How one result type is taken apart and put together again.
template <class T, class = void>
struct Result {
  static_assert(sizeof(T) == 0, "a graphed call gives a Tensor, or an optional, a vector or a tuple of Tensors");
};

template <>
struct Result<at::Tensor> {
  static void flatten(const at::Tensor& value, TensorBuffer& tensors) { tensors.push_back(value); }
  static at::Tensor rebuild(const TensorBuffer& tensors) { return tensors[0]; }
};

template <>
struct Result<std::optional<at::Tensor>> {
  using T = std::optional<at::Tensor>;
  static void flatten(const T& value, TensorBuffer& tensors) { tensors.push_back(value ? *value : at::Tensor()); }
  static T rebuild(const TensorBuffer& tensors) { return tensors[0].defined() ? T(tensors[0]) : T(); }
};

template <>
struct Result<std::vector<at::Tensor>> {
  using T = std::vector<at::Tensor>;
  static void flatten(const T& value, TensorBuffer& tensors) { tensors.append(value.begin(), value.end()); }
  static T rebuild(const TensorBuffer& tensors) { return T(tensors.begin(), tensors.end()); }
};

template <class... Ts>
struct Result<std::tuple<Ts...>> {
  static_assert((std::is_same_v<Ts, at::Tensor> && ...), "a graphed call's tuple holds Tensors only");
  using T = std::tuple<Ts...>;
  static void flatten(const T& value, TensorBuffer& tensors) {
    std::apply([&](const auto&... t) { (tensors.push_back(t), ...); }, value);
  }
  template <std::size_t... i>
  static T rebuild_each(const TensorBuffer& tensors, std::index_sequence<i...> /*indices*/) {
    return T(tensors[i]...);
  }
  static T rebuild(const TensorBuffer& tensors) { return rebuild_each(tensors, std::index_sequence_for<Ts...>()); }
};

}  // namespace detail
}  // namespace sidestream
