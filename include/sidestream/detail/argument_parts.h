#pragma once
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "sidestream/detail/argument_values.h"
#include "sidestream/detail/module_forward.h"
#include "sidestream/stays.h"

/// Internals of `ss::call`, which may change at any time.
namespace sidestream::detail {

using TensorBuffer = c10::SmallVector<at::Tensor, 8>;

/// An argument that is not a tensor, by reference. It is compared with the value at the capture, and copied only at a capture.
struct Guard {
  const void* value;
  const std::type_info* type;
  bool (*equal)(const void* kept, const void* given);
  std::shared_ptr<const void> (*copy)(const void*);
};
using GuardBuffer = c10::SmallVector<Guard, 8>;

template <class T>
Guard make_guard(const T& value) {
  return {&value, &typeid(T),
          [](const void* a, const void* b) {
            return equal_values<T>(*static_cast<const T*>(a), *static_cast<const T*>(b));
          },
          [](const void* v) -> std::shared_ptr<const void> {
            return std::make_shared<const T>(*static_cast<const T*>(v));
          }};
}

/// One guard for the types of a call. It has no value.
template <class Signature>
Guard make_signature_guard() {
  return {nullptr, &typeid(Signature), [](const void* /*a*/, const void* /*b*/) { return true; },
          [](const void* /*value*/) { return std::shared_ptr<const void>(); }};
}
/// Sizes of containers, and which optionals are set. These are guards too, stored by value while a call is taken apart.
using ShapeBuffer = c10::SmallVector<std::size_t, 8>;

/// The parts of one call's arguments.
struct Parts {
  TensorBuffer& tensors;
  GuardBuffer& guards;
  ShapeBuffer& shape;
};
/// The modules among kept arguments.
using KeptModules = std::vector<std::shared_ptr<const torch::nn::Module>>;

/// Takes one argument type apart into tensors, guards and sizes, keeps it without its tensors, and puts it together again.
/// `Kept` owns all that it holds; a `Rebuilt` may refer to it. This general case is for types that are not allowed as arguments.
template <class T, class = void>
struct Argument {
  static constexpr bool allowed = false;
  using Kept = int;
  using Rebuilt = T;
  static void flatten(const T& /*value*/, const Parts& /*parts*/) {}
  static Kept keep(const T& /*value*/, KeptModules& /*modules*/) { return 0; }
  static T rebuild(const Kept& kept, const at::Tensor*& next);  // not defined: such a call does not compile
};

/// A value is one guard.
template <class T>
struct Argument<T, std::enable_if_t<is_value<T>>> {
  static constexpr bool allowed = true;
  using Kept = T;
  using Rebuilt = const T&;
  static void flatten(const T& value, const Parts& parts) { parts.guards.push_back(make_guard(value)); }
  static Kept keep(const T& value, KeptModules& /*modules*/) { return value; }
  static const T& rebuild(const Kept& kept, const at::Tensor*& /*next*/) { return kept; }
};

template <>
struct Argument<at::Tensor> {
  static constexpr bool allowed = true;
  struct Kept {};
  using Rebuilt = at::Tensor;
  static void flatten(const at::Tensor& value, const Parts& parts) { parts.tensors.push_back(value); }
  static Kept keep(const at::Tensor& /*value*/, KeptModules& /*modules*/) { return {}; }
  static at::Tensor rebuild(const Kept& /*kept*/, const at::Tensor*& next) { return *next++; }
};

/// C strings are compared by content; null is a value.
template <>
struct Argument<const char*> {
  static constexpr bool allowed = true;
  using Kept = std::optional<std::string>;
  using Rebuilt = const char*;
  static Kept text_of(const char* value) { return value == nullptr ? Kept() : Kept(value); }
  static void flatten(const char* const& value, const Parts& parts) {
    parts.guards.push_back({&value, &typeid(const char*),
                            [](const void* kept, const void* given) {
                              const auto& text = *static_cast<const Kept*>(kept);
                              const char* const other = *static_cast<const char* const*>(given);
                              return text.has_value() ? other != nullptr && *text == other : other == nullptr;
                            },
                            [](const void* given) -> std::shared_ptr<const void> {
                              return std::make_shared<const Kept>(text_of(*static_cast<const char* const*>(given)));
                            }});
  }
  static Kept keep(const char* value, KeptModules& /*modules*/) { return text_of(value); }
  static const char* rebuild(const Kept& kept, const at::Tensor*& /*next*/) { return kept ? kept->c_str() : nullptr; }
};

/// A kept pointer is compared by its address.
template <class T>
struct Argument<Stays<T>> {
  static constexpr bool allowed = true;
  using Kept = Stays<T>;
  using Rebuilt = const Kept&;
  static void flatten(const Stays<T>& value, const Parts& parts) {
    parts.guards.push_back({&value, &typeid(Stays<T>),
                            [](const void* a, const void* b) {
                              return static_cast<const Kept*>(a)->get() == static_cast<const Kept*>(b)->get();
                            },
                            [](const void* v) -> std::shared_ptr<const void> {
                              return std::make_shared<const Kept>(*static_cast<const Kept*>(v));
                            }});
  }
  static Kept keep(const Stays<T>& value, KeptModules& /*modules*/) { return value; }
  static const Kept& rebuild(const Kept& kept, const at::Tensor*& /*next*/) { return kept; }
};

/// A pointer whose target is kept: a tensor must be the same tensor, a value must be equal.
template <class T>
struct Argument<StaysByValue<T>> {
  static constexpr bool allowed = true;
  using Kept = std::optional<T>;  ///< not set for a null pointer
  using Rebuilt = StaysByValue<T>;
  static Kept value_of(const StaysByValue<T>& value) { return value.get() == nullptr ? Kept() : Kept(*value.get()); }
  static bool same(const T& a, const T& b) {
    if constexpr (std::is_same_v<T, at::Tensor>) {
      return a.is_same(b);
    } else {
      return equal_values<T>(a, b);
    }
  }
  static void flatten(const StaysByValue<T>& value, const Parts& parts) {
    parts.guards.push_back({&value, &typeid(StaysByValue<T>),
                            [](const void* kept, const void* given) {
                              const auto& mine = *static_cast<const Kept*>(kept);
                              const T* const other = static_cast<const StaysByValue<T>*>(given)->get();
                              return mine.has_value() ? other != nullptr && same(*mine, *other) : other == nullptr;
                            },
                            [](const void* given) -> std::shared_ptr<const void> {
                              return std::make_shared<const Kept>(
                                  value_of(*static_cast<const StaysByValue<T>*>(given)));
                            }});
  }
  static Kept keep(const StaysByValue<T>& value, KeptModules& /*modules*/) { return value_of(value); }
  static Rebuilt rebuild(const Kept& kept, const at::Tensor*& /*next*/) { return Rebuilt(kept ? &*kept : nullptr); }
};

}  // namespace sidestream::detail
