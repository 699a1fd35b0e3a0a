#pragma once
#include <array>
#include <cstddef>
#include <functional>
#include <initializer_list>
#include <memory>
#include <string_view>
#include <type_traits>
#if __cplusplus >= 202002L
#include <span>
#endif

#include <c10/util/ArrayRef.h>
#include <c10/util/OptionalArrayRef.h>

// Types that ss::call refuses, so that a compile error can say what to pass instead.

/// Internals of `ss::call`, which may change at any time.
namespace sidestream::detail {

/// Types that only borrow their memory, and types that contain such types.
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

/// Smart pointers: the library does not see changes of their target.
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

}  // namespace sidestream::detail
