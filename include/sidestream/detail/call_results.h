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

#include "sidestream/detail/argument_values.h"
#include "sidestream/detail/call_arguments.h"

/// Internals of `ss::call`, which may change at any time.
namespace sidestream::detail {

/// Takes one result type apart into tensors and a `Structure` (sizes, keys, which optionals are set), and puts it together again. A capture
/// keeps the structure of its body's result. This general case is for types that are not allowed as results.
template <class T, class = void>
struct Result {
  static constexpr bool allowed = false;
  struct Structure {};
  static void flatten(const T& /*value*/, TensorBuffer& /*tensors*/) {}
  static Structure structure(const T& /*value*/) { return {}; }
};

template <>
struct Result<at::Tensor> {
  static constexpr bool allowed = true;
  struct Structure {};
  static void flatten(const at::Tensor& value, TensorBuffer& tensors) { tensors.push_back(value); }
  static Structure structure(const at::Tensor& /*value*/) { return {}; }
  static at::Tensor rebuild(const Structure& /*structure*/, const at::Tensor*& next) { return *next++; }
};

template <class T>
struct Result<std::optional<T>> {
  static constexpr bool allowed = Result<T>::allowed;
  using Structure = std::optional<typename Result<T>::Structure>;
  static void flatten(const std::optional<T>& value, TensorBuffer& tensors) {
    if (value) {
      Result<T>::flatten(*value, tensors);
    }
  }
  static Structure structure(const std::optional<T>& value) {
    return value ? Structure(Result<T>::structure(*value)) : Structure();
  }
  static std::optional<T> rebuild(const Structure& structure, const at::Tensor*& next) {
    return structure ? std::optional<T>(Result<T>::rebuild(*structure, next)) : std::nullopt;
  }
};

template <class T, class Allocator>
struct Result<std::vector<T, Allocator>> {
  static constexpr bool allowed = Result<T>::allowed;
  using Structure = std::vector<typename Result<T>::Structure>;
  static void flatten(const std::vector<T, Allocator>& value, TensorBuffer& tensors) {
    for (const T& element : value) {
      Result<T>::flatten(element, tensors);
    }
  }
  static Structure structure(const std::vector<T, Allocator>& value) {
    Structure result;
    for (const T& element : value) {
      result.push_back(Result<T>::structure(element));
    }
    return result;
  }
  static std::vector<T, Allocator> rebuild(const Structure& structure, const at::Tensor*& next) {
    std::vector<T, Allocator> result;
    result.reserve(structure.size());
    for (const auto& element : structure) {
      result.push_back(Result<T>::rebuild(element, next));
    }
    return result;
  }
};

/// std::array, std::pair and std::tuple. Braces evaluate from left to right.
template <class T, class... Ts>
struct TupleResult {
  static constexpr bool allowed = (Result<Ts>::allowed && ...);
  using Structure = std::tuple<typename Result<Ts>::Structure...>;
  using Indices = std::index_sequence_for<Ts...>;
  template <std::size_t... i>
  static void flatten_each(const T& value, TensorBuffer& tensors, std::index_sequence<i...> /*indices*/) {
    (Result<Ts>::flatten(std::get<i>(value), tensors), ...);
  }
  static void flatten(const T& value, TensorBuffer& tensors) { flatten_each(value, tensors, Indices()); }
  template <std::size_t... i>
  static Structure structure_each(const T& value, std::index_sequence<i...> /*indices*/) {
    return Structure{Result<Ts>::structure(std::get<i>(value))...};
  }
  static Structure structure(const T& value) { return structure_each(value, Indices()); }
  template <std::size_t... i>
  static T rebuild_each(const Structure& structure, const at::Tensor*& next, std::index_sequence<i...> /*indices*/) {
    return T{Result<Ts>::rebuild(std::get<i>(structure), next)...};
  }
  static T rebuild(const Structure& structure, const at::Tensor*& next) {
    return rebuild_each(structure, next, Indices());
  }
};
template <class... Ts>
struct Result<std::tuple<Ts...>> : TupleResult<std::tuple<Ts...>, Ts...> {};
template <class A, class B>
struct Result<std::pair<A, B>> : TupleResult<std::pair<A, B>, A, B> {};
template <class T, class Indices>
struct ArrayResult;
template <class T, std::size_t... i>
struct ArrayResult<T, std::index_sequence<i...>>
    : TupleResult<std::array<T, sizeof...(i)>, std::enable_if_t<(i >= 0), T>...> {};
template <class T, std::size_t n>
struct Result<std::array<T, n>> : ArrayResult<T, std::make_index_sequence<n>> {};

/// Maps whose keys are values.
template <class T>
struct MapResult {
  using K = typename T::key_type;
  using V = typename T::mapped_type;
  static constexpr bool allowed = is_value<K> && Result<V>::allowed && std::is_default_constructible_v<V>;
  struct Structure {
    T keys;
    std::vector<std::pair<K, typename Result<V>::Structure>> entries;
  };
  static void flatten(const T& value, TensorBuffer& tensors) {
    for (const auto& [key, mapped] : value) {
      Result<V>::flatten(mapped, tensors);
    }
  }
  static Structure structure(const T& value) {
    Structure result{value, {}};
    for (const auto& [key, mapped] : value) {
      result.entries.emplace_back(key, Result<V>::structure(mapped));
    }
    for (auto& entry : result.keys) {
      entry.second = V();
    }
    return result;
  }
  static T rebuild(const Structure& structure, const at::Tensor*& next) {
    T result = structure.keys;
    for (const auto& [key, mapped] : structure.entries) {
      result.find(key)->second = Result<V>::rebuild(mapped, next);
    }
    return result;
  }
};
template <class K, class V, class... Rest>
struct Result<std::map<K, V, Rest...>> : MapResult<std::map<K, V, Rest...>> {};
template <class K, class V, class... Rest>
struct Result<std::unordered_map<K, V, Rest...>> : MapResult<std::unordered_map<K, V, Rest...>> {};

template <class T>
constexpr void check_result() {
  static_assert(
      Result<T>::allowed,
      "sidestream: a function or forward that ss::call runs must return a Tensor, or optionals, vectors, arrays, "
      "pairs, tuples and maps of Tensors. A number would be frozen at its first value: compute it outside of the call");
}

}  // namespace sidestream::detail
