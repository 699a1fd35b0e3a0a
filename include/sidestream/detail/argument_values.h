#pragma once
#include <complex>
#include <cstring>
#include <limits>
#include <type_traits>

#include <c10/core/Device.h>
#include <c10/core/Scalar.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <c10/util/complex.h>

#include "sidestream/argument_traits.h"
#include "sidestream/detail/value_containers.h"

/// Internals of `ss::call`, which may change at any time.
namespace sidestream::detail {

template <class T>
struct EqualByOperator : std::true_type {
  static bool equal(const T& a, const T& b) { return a == b; }
};
template <class T>
struct EqualByBits : std::true_type {
  static bool equal(const T& a, const T& b) { return std::memcmp(&a, &b, sizeof(T)) == 0; }
};

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
    // On x86 a long double has ten bytes; the rest is padding.
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

}  // namespace sidestream::detail
