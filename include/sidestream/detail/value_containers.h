#pragma once
#include <array>
#include <cstddef>
#include <deque>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "sidestream/argument_traits.h"

/// Internals of `ss::call`, which may change at any time.
namespace sidestream::detail {

/// Compares element by element, in order.
template <class T, class Element>
struct EqualElements : std::bool_constant<is_value<Element>> {
  static bool equal(const T& a, const T& b) {
    if (a.size() != b.size()) {
      return false;
    }
    auto other = b.begin();
    for (const auto& element : a) {
      if (!equal_values<Element>(element, *other++)) {
        return false;
      }
    }
    return true;
  }
};
template <class T, class Allocator>
struct ListedValue<std::vector<T, Allocator>> : EqualElements<std::vector<T, Allocator>, T> {};
template <class T, class Allocator>
struct ListedValue<std::deque<T, Allocator>> : EqualElements<std::deque<T, Allocator>, T> {};
template <class T, class Allocator>
struct ListedValue<std::list<T, Allocator>> : EqualElements<std::list<T, Allocator>, T> {};
template <class T, std::size_t n>
struct ListedValue<std::array<T, n>, std::enable_if_t<!is_stateless<std::array<T, n>>>>
    : EqualElements<std::array<T, n>, T> {};
template <class T, class... Rest>
struct ListedValue<std::set<T, Rest...>> : EqualElements<std::set<T, Rest...>, T> {};
template <class K, class V, class... Rest>
struct ListedValue<std::map<K, V, Rest...>> : EqualElements<std::map<K, V, Rest...>, std::pair<const K, V>> {};
// A body may depend on their order, so the same elements in another order are another value.
template <class T, class... Rest>
struct ListedValue<std::unordered_set<T, Rest...>> : EqualElements<std::unordered_set<T, Rest...>, T> {};
template <class K, class V, class... Rest>
struct ListedValue<std::unordered_map<K, V, Rest...>>
    : EqualElements<std::unordered_map<K, V, Rest...>, std::pair<const K, V>> {};
template <class T>
struct ListedValue<std::optional<T>> : std::bool_constant<is_value<T>> {
  static bool equal(const std::optional<T>& a, const std::optional<T>& b) {
    return a.has_value() == b.has_value() && (!a || equal_values<T>(*a, *b));
  }
};
template <class A, class B>
struct ListedValue<std::pair<A, B>> : std::bool_constant<is_value<std::remove_const_t<A>> && is_value<B>> {
  static bool equal(const std::pair<A, B>& a, const std::pair<A, B>& b) {
    return equal_values<std::remove_const_t<A>>(a.first, b.first) && equal_values<B>(a.second, b.second);
  }
};
template <class... Ts>
struct ListedValue<std::tuple<Ts...>, std::enable_if_t<!is_stateless<std::tuple<Ts...>>>>
    : std::bool_constant<(is_value<Ts> && ...)> {
  using T = std::tuple<Ts...>;
  template <std::size_t... i>
  static bool equal_each(const T& a, const T& b, std::index_sequence<i...> /*indices*/) {
    return (equal_values<Ts>(std::get<i>(a), std::get<i>(b)) && ...);
  }
  static bool equal(const T& a, const T& b) { return equal_each(a, b, std::index_sequence_for<Ts...>()); }
};
template <class... Ts>
struct ListedValue<std::variant<Ts...>> : std::bool_constant<(is_value<Ts> && ...)> {
  using T = std::variant<Ts...>;
  template <std::size_t... i>
  static bool equal_each(const T& a, const T& b, std::index_sequence<i...> /*indices*/) {
    return ((a.index() != i || equal_values<Ts>(*std::get_if<i>(&a), *std::get_if<i>(&b))) && ...);
  }
  static bool equal(const T& a, const T& b) {
    return a.index() == b.index() && equal_each(a, b, std::index_sequence_for<Ts...>());
  }
};

}  // namespace sidestream::detail
