#pragma once
#include <array>
#include <complex>
#include <cstddef>
#include <cstring>
#include <deque>
#include <functional>
#include <initializer_list>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>
#if __cplusplus >= 202002L
#include <span>
#endif

#include <c10/core/Device.h>
#include <c10/core/Scalar.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/OptionalArrayRef.h>
#include <c10/util/complex.h>

namespace sidestream {

/// Base of ArgumentTraits for a type that is compared with its `==`.
struct ComparedByValue {};

/// Says that values of `T` may be arguments of `ss::call`: a copy of one is kept by a capture, and compared with what later calls
/// are given. One line at namespace scope, where `T` has `==`:
///
///     template <> struct sidestream::ArgumentTraits<Config> : sidestream::ComparedByValue {};
///
/// else with a `static bool equal(const T&, const T&)` in place of the base. `T` owns all that it holds, holds no tensors (pass
/// them beside it: they are inputs), and a copy of a value equals it, also where it holds a NaN.
template <class T, class = void>
struct ArgumentTraits {};

/// What `ss::call` is made of. Of no use to a trainer, and it may change at any time.
namespace detail {

template <class T, class = void>
struct HasEqual : std::false_type {};
template <class T>
struct HasEqual<T, std::void_t<decltype(ArgumentTraits<T>::equal(std::declval<const T&>(), std::declval<const T&>()))>>
    : std::true_type {};

/// Types that the user has let join.
template <class T>
constexpr bool joined = std::is_base_of_v<ComparedByValue, ArgumentTraits<T>> || HasEqual<T>::value;

template <class T, class = void>
struct HasEquality : std::false_type {};
template <class T>
struct HasEquality<T, std::void_t<decltype(bool(std::declval<const T&>() == std::declval<const T&>()))>>
    : std::true_type {};

/// Types that are values by themselves: a copy owns all that it holds, and `equal` is an equivalence that every value fulfils
/// with its copy. Floating-point numbers are compared by their bits, so that a NaN equals itself and -0 differs from 0.
template <class T, class = void>
struct ListedValue : std::false_type {};

template <class T>
constexpr bool is_value = joined<T> || ListedValue<T>::value;

template <class T>
bool equal_values(const T& a, const T& b) {
  if constexpr (HasEqual<T>::value) {
    return ArgumentTraits<T>::equal(a, b);
  } else if constexpr (joined<T>) {
    static_assert(
        HasEquality<T>::value,
        "sidestream: this type's ArgumentTraits say ComparedByValue, but it has no operator==: give it one, or "
        "give the traits a static bool equal(const T&, const T&)");
    if constexpr (HasEquality<T>::value) {
      return a == b;
    } else {
      return false;
    }
  } else {
    return ListedValue<T>::equal(a, b);
  }
}

template <class T>
struct EqualByOperator : std::true_type {
  static bool equal(const T& a, const T& b) { return a == b; }
};
template <class T>
struct EqualByBits : std::true_type {
  static bool equal(const T& a, const T& b) { return std::memcmp(&a, &b, sizeof(T)) == 0; }
};

/// Types without members hold nothing: tags, captureless lambdas, std::nullopt.
template <class T>
constexpr bool is_stateless = std::is_empty_v<T>&& std::is_trivially_copyable_v<T>;
template <class T>
constexpr bool is_function_pointer =
    (std::is_pointer_v<T> && std::is_function_v<std::remove_pointer_t<T>>) || std::is_member_function_pointer_v<T>;

template <class T>
struct ListedValue<T, std::enable_if_t<std::is_integral_v<T> || std::is_enum_v<T> || std::is_null_pointer_v<T> ||
                                       is_function_pointer<T>>> : EqualByOperator<T> {};
template <class T>
struct ListedValue<T, std::enable_if_t<is_stateless<T> && !std::is_enum_v<T>>> : std::true_type {
  static bool equal(const T& /*a*/, const T& /*b*/) { return true; }
};
template <>
struct ListedValue<float> : EqualByBits<float> {};
template <>
struct ListedValue<double> : EqualByBits<double> {};
template <>
struct ListedValue<long double> : std::true_type {
  static bool equal(const long double& a, const long double& b) {
    // What follows the ten bytes of x86's is padding.
    return std::memcmp(&a, &b, std::numeric_limits<long double>::digits == 64 ? 10 : sizeof(a)) == 0;
  }
};
template <>
struct ListedValue<c10::Half> : EqualByBits<c10::Half> {};
template <>
struct ListedValue<c10::BFloat16> : EqualByBits<c10::BFloat16> {};
template <class T>
struct ListedValue<std::complex<T>> : EqualByBits<std::complex<T>> {};
template <class T>
struct ListedValue<c10::complex<T>> : EqualByBits<c10::complex<T>> {};
template <class C, class Traits, class Allocator>
struct ListedValue<std::basic_string<C, Traits, Allocator>> : EqualByOperator<std::basic_string<C, Traits, Allocator>> {
};
template <>
struct ListedValue<c10::Device> : EqualByOperator<c10::Device> {};
template <>
struct ListedValue<c10::Scalar> : std::true_type {
  static bool equal(const c10::Scalar& a, const c10::Scalar& b) {
    if (a.isSymbolic() || b.isSymbolic() || a.type() != b.type()) {
      return false;
    }
    if (a.isComplex()) {
      return equal_values(a.toComplexDouble(), b.toComplexDouble());
    }
    if (a.isFloatingPoint()) {
      return equal_values(a.toDouble(), b.toDouble());
    }
    return a.isBoolean()
               ? a.toBool() == b.toBool()
               : (a.type() == c10::ScalarType::UInt64 ? a.toUInt64() == b.toUInt64() : a.toLong() == b.toLong());
  }
};
template <>
struct ListedValue<c10::TensorOptions> : std::true_type {
  static bool equal(const c10::TensorOptions& a, const c10::TensorOptions& b) {
    return a.dtype_opt() == b.dtype_opt() && a.device_opt() == b.device_opt() && a.layout_opt() == b.layout_opt() &&
           a.requires_grad_opt() == b.requires_grad_opt() && a.pinned_memory_opt() == b.pinned_memory_opt() &&
           a.memory_format_opt() == b.memory_format_opt();
  }
};

/// In order, element by element.
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
struct ListedValue<std::map<K, V, Rest...>> : std::bool_constant<is_value<K> && is_value<V>> {
  using T = std::map<K, V, Rest...>;
  static bool equal(const T& a, const T& b) { return EqualElements<T, typename T::value_type>::equal(a, b); }
};
// Their order may matter to a body: the same elements in another order are another value.
template <class T, class... Rest>
struct ListedValue<std::unordered_set<T, Rest...>> : EqualElements<std::unordered_set<T, Rest...>, T> {};
template <class K, class V, class... Rest>
struct ListedValue<std::unordered_map<K, V, Rest...>> : std::bool_constant<is_value<K> && is_value<V>> {
  using T = std::unordered_map<K, V, Rest...>;
  static bool equal(const T& a, const T& b) { return EqualElements<T, typename T::value_type>::equal(a, b); }
};
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

/// Types that only borrow what they show, alone or inside another type.
template <class T>
struct Borrows : std::false_type {};
template <template <class...> class Of, class... Ts>
struct Borrows<Of<Ts...>> : std::disjunction<Borrows<Ts>...> {};
template <class T, std::size_t n>
struct Borrows<std::array<T, n>> : Borrows<T> {};
template <class T>
struct Borrows<c10::ArrayRef<T>> : std::true_type {};
template <class T>
struct Borrows<c10::OptionalArrayRef<T>> : std::true_type {};
template <class C, class Traits>
struct Borrows<std::basic_string_view<C, Traits>> : std::true_type {};
template <class T>
struct Borrows<std::initializer_list<T>> : std::true_type {};
template <class T>
struct Borrows<std::reference_wrapper<T>> : std::true_type {};
#if __cplusplus >= 202002L
template <class T, std::size_t n>
struct Borrows<std::span<T, n>> : std::true_type {};
#endif

/// Smart pointers, whose target may change unseen.
template <class T>
struct IsSmartPointer : std::false_type {};
template <class T>
struct IsSmartPointer<std::shared_ptr<T>> : std::true_type {};
template <class T>
struct IsSmartPointer<std::weak_ptr<T>> : std::true_type {};
template <class T, class Deleter>
struct IsSmartPointer<std::unique_ptr<T, Deleter>> : std::true_type {};

template <class T>
struct IsStdFunction : std::false_type {};
template <class T>
struct IsStdFunction<std::function<T>> : std::true_type {};

}  // namespace detail
}  // namespace sidestream
