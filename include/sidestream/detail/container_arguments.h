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

#include "sidestream/detail/argument_parts.h"

/// Internals of `ss::call`, which may change at any time.
namespace sidestream::detail {

// Containers that hold tensors, modules or C strings somewhere. A container that holds only values is itself a value.

template <class T>
struct Argument<std::optional<T>, std::enable_if_t<!is_value<std::optional<T>>>> {
  static constexpr bool allowed = Argument<T>::allowed;
  using Kept = std::optional<typename Argument<T>::Kept>;
  using Rebuilt = std::optional<T>;
  static void flatten(const Rebuilt& value, const Parts& parts) {
    parts.shape.push_back(value.has_value() ? 1 : 0);
    if (value) {
      Argument<T>::flatten(*value, parts);
    }
  }
  static Kept keep(const Rebuilt& value, KeptModules& modules) {
    return value ? Kept(Argument<T>::keep(*value, modules)) : Kept();
  }
  static Rebuilt rebuild(const Kept& kept, const at::Tensor*& next) {
    return kept ? Rebuilt(Argument<T>::rebuild(*kept, next)) : Rebuilt();
  }
};

template <class T, class Allocator>
struct Argument<std::vector<T, Allocator>, std::enable_if_t<!is_value<std::vector<T, Allocator>>>> {
  static constexpr bool allowed = Argument<T>::allowed;
  using Kept = std::vector<typename Argument<T>::Kept>;
  using Rebuilt = std::vector<T, Allocator>;
  static void flatten(const Rebuilt& value, const Parts& parts) {
    parts.shape.push_back(value.size());
    for (const T& element : value) {
      Argument<T>::flatten(element, parts);
    }
  }
  static Kept keep(const Rebuilt& value, KeptModules& modules) {
    Kept kept;
    for (const T& element : value) {
      kept.push_back(Argument<T>::keep(element, modules));
    }
    return kept;
  }
  static Rebuilt rebuild(const Kept& kept, const at::Tensor*& next) {
    Rebuilt result;
    result.reserve(kept.size());
    for (const auto& element : kept) {
      result.push_back(Argument<T>::rebuild(element, next));
    }
    return result;
  }
};

/// std::array, std::pair and std::tuple: `Ts` are the types of their elements. Braces evaluate from left to right.
template <class T, class... Ts>
struct TupleArgument {
  static constexpr bool allowed = (Argument<Ts>::allowed && ...);
  using Kept = std::tuple<typename Argument<Ts>::Kept...>;
  using Rebuilt = T;
  using Indices = std::index_sequence_for<Ts...>;
  template <std::size_t... i>
  static void flatten_each(const T& value, const Parts& parts, std::index_sequence<i...> /*indices*/) {
    (Argument<Ts>::flatten(std::get<i>(value), parts), ...);
  }
  static void flatten(const T& value, const Parts& parts) { flatten_each(value, parts, Indices()); }
  template <std::size_t... i>
  static Kept keep_each(const T& value, KeptModules& modules, std::index_sequence<i...> /*indices*/) {
    return Kept{Argument<Ts>::keep(std::get<i>(value), modules)...};
  }
  static Kept keep(const T& value, KeptModules& modules) { return keep_each(value, modules, Indices()); }
  template <std::size_t... i>
  static T rebuild_each(const Kept& kept, const at::Tensor*& next, std::index_sequence<i...> /*indices*/) {
    return T{Argument<Ts>::rebuild(std::get<i>(kept), next)...};
  }
  static T rebuild(const Kept& kept, const at::Tensor*& next) { return rebuild_each(kept, next, Indices()); }
};
template <class... Ts>
struct Argument<std::tuple<Ts...>, std::enable_if_t<!is_value<std::tuple<Ts...>>>>
    : TupleArgument<std::tuple<Ts...>, Ts...> {};
template <class A, class B>
struct Argument<std::pair<A, B>, std::enable_if_t<!is_value<std::pair<A, B>>>> : TupleArgument<std::pair<A, B>, A, B> {
};
template <class T, class Indices>
struct ArrayArgument;
template <class T, std::size_t... i>
struct ArrayArgument<T, std::index_sequence<i...>>
    : TupleArgument<std::array<T, sizeof...(i)>, std::enable_if_t<(i >= 0), T>...> {};
template <class T, std::size_t n>
struct Argument<std::array<T, n>, std::enable_if_t<!is_value<std::array<T, n>>>>
    : ArrayArgument<T, std::make_index_sequence<n>> {};

/// Maps whose keys are values. A body gets a copy of the caller's map with other mapped values, so its order is the caller's.
template <class T>
struct MapArgument {
  using K = typename T::key_type;
  using V = typename T::mapped_type;
  static constexpr bool allowed = is_value<K> && Argument<V>::allowed && std::is_default_constructible_v<V>;
  struct Kept {
    T keys;
    std::vector<std::pair<K, typename Argument<V>::Kept>> entries;  ///< in the order in which they were taken apart
  };
  using Rebuilt = T;
  static void flatten(const T& value, const Parts& parts) {
    parts.shape.push_back(value.size());
    for (const auto& [key, mapped] : value) {
      parts.guards.push_back(make_guard(key));
      Argument<V>::flatten(mapped, parts);
    }
  }
  static Kept keep(const T& value, KeptModules& modules) {
    Kept kept{value, {}};
    for (const auto& [key, mapped] : value) {
      kept.entries.emplace_back(key, Argument<V>::keep(mapped, modules));
    }
    for (auto& entry : kept.keys) {
      entry.second = V();
    }
    return kept;
  }
  static T rebuild(const Kept& kept, const at::Tensor*& next) {
    T result = kept.keys;
    for (const auto& [key, mapped] : kept.entries) {
      result.find(key)->second = Argument<V>::rebuild(mapped, next);
    }
    return result;
  }
};
template <class K, class V, class... Rest>
struct Argument<std::map<K, V, Rest...>, std::enable_if_t<!is_value<std::map<K, V, Rest...>>>>
    : MapArgument<std::map<K, V, Rest...>> {};
template <class K, class V, class... Rest>
struct Argument<std::unordered_map<K, V, Rest...>, std::enable_if_t<!is_value<std::unordered_map<K, V, Rest...>>>>
    : MapArgument<std::unordered_map<K, V, Rest...>> {};

}  // namespace sidestream::detail
