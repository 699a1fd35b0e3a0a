#pragma once
#include <array>
#include <cstddef>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "sidestream/detail/argument_parts.h"
#include "sidestream/detail/argument_values.h"
#include "sidestream/detail/container_arguments.h"

/// Internals of `ss::call`, which may change at any time.
namespace sidestream::detail {

/// Types that a call may return. All of them are allowed as arguments too, so `Argument` takes a result apart. Not every argument may be
/// returned: a replay would return a number as it was at the capture.
template <class T>
struct Returnable : std::false_type {};
template <>
struct Returnable<at::Tensor> : std::true_type {};
template <class T>
struct Returnable<std::optional<T>> : Returnable<T> {};
template <class T, class Allocator>
struct Returnable<std::vector<T, Allocator>> : Returnable<T> {};
template <class T, std::size_t n>
struct Returnable<std::array<T, n>> : Returnable<T> {};
template <class A, class B>
struct Returnable<std::pair<A, B>> : std::conjunction<Returnable<A>, Returnable<B>> {};
template <class... Ts>
struct Returnable<std::tuple<Ts...>> : std::conjunction<Returnable<Ts>...> {};
template <class K, class V>
constexpr bool returnable_entry = is_value<K>&& Returnable<V>::value&& std::is_default_constructible_v<V>;
template <class K, class V, class... Rest>
struct Returnable<std::map<K, V, Rest...>> : std::bool_constant<returnable_entry<K, V>> {};
template <class K, class V, class... Rest>
struct Returnable<std::unordered_map<K, V, Rest...>> : std::bool_constant<returnable_entry<K, V>> {};

template <class T>
constexpr bool returnable = Returnable<T>::value;

/// Appends the tensors of a result to `tensors`. Returns its structure: sizes, keys, and which optionals are set.
template <class R>
typename Argument<R>::Kept take_apart(const R& result, TensorBuffer& tensors) {
  // The structure says the same as the guards and the shape. A result has no modules.
  GuardBuffer guards;
  ShapeBuffer shape;
  KeptModules modules;
  Argument<R>::flatten(result, {tensors, guards, shape});
  return Argument<R>::keep(result, modules);
}

template <class T>
constexpr void check_result() {
  static_assert(
      returnable<T>,
      "sidestream: a function or forward that ss::call runs must return a Tensor, or optionals, vectors, arrays, "
      "pairs, tuples and maps of Tensors. A number would be frozen at its first value: compute it outside of the call");
}

}  // namespace sidestream::detail
