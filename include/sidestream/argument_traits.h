#pragma once
#include <type_traits>
#include <utility>

namespace sidestream {

/// Base of ArgumentTraits for a type whose values are compared with its `==`.
struct ComparedByValue {};

/// Allows values of type `T` as arguments of `ss::call`. A capture keeps a copy of the value and compares it with later calls' values.
///
/// If `T` has `==`, one line at namespace scope suffices:
///
///     template <> struct sidestream::ArgumentTraits<Config> : sidestream::ComparedByValue {};
///
/// If it has none, give the specialisation a `static bool equal(const T&, const T&)` instead of the base. `T` must own all that it holds,
/// and must hold no tensors: a struct with tensors lists its Members. A copy of a value must equal the value, even if it holds a NaN.
template <class T, class = void>
struct ArgumentTraits {};

/// Base of ArgumentTraits for a struct with tensors in it, which lists its members. One line at namespace scope:
///
///     template <> struct sidestream::ArgumentTraits<RoPE> : sidestream::Members<&RoPE::sin, &RoPE::cos> {};
///
/// Each member is then treated like an argument of its own: a tensor is an input, which each replay reads anew, and a value is a
/// guard. A member may be a container, or a struct with ArgumentTraits of its own. `ss::call` takes the struct by value, in
/// containers, and by pointer. The pointer may be null, and may point to a local variable; the function gets a pointer to const.
///
/// A member that borrows its memory does not compile. An aggregate must list all its members, in the order of their declaration, or it
/// does not compile. For any other class (with a constructor, say), the compiler cannot count the members. There a capture freezes a
/// member that is not listed, and Options::verify_replays finds a change of it.
template <auto... members>
struct Members {};

/// Internals of `ss::call`, which may change at any time.
namespace detail {

template <class T, class = void>
struct HasEqual : std::false_type {};
template <class T>
struct HasEqual<T, std::void_t<decltype(ArgumentTraits<T>::equal(std::declval<const T&>(), std::declval<const T&>()))>>
    : std::true_type {};

/// True for types with ArgumentTraits.
template <class T>
constexpr bool joined = std::is_base_of_v<ComparedByValue, ArgumentTraits<T>> || HasEqual<T>::value;

template <class T, class = void>
struct HasEquality : std::false_type {};
template <class T>
struct HasEquality<T, std::void_t<decltype(bool(std::declval<const T&>() == std::declval<const T&>()))>>
    : std::true_type {};

/// Types that are values without ArgumentTraits: a copy owns all that it holds, and `equal` holds for a value and its copy.
/// Floating-point numbers are compared by their bits, so a NaN equals itself and -0 differs from 0.
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

/// Types without members: tags, lambdas without captures, std::nullopt.
template <class T>
constexpr bool is_stateless = std::is_empty_v<T>&& std::is_trivially_copyable_v<T>;
template <class T>
constexpr bool is_function_pointer =
    (std::is_pointer_v<T> && std::is_function_v<std::remove_pointer_t<T>>) || std::is_member_function_pointer_v<T>;

}  // namespace detail
}  // namespace sidestream
