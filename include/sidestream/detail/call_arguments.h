#pragma once
#include <memory>
#include <type_traits>
#include <typeinfo>

#include "sidestream/detail/argument_parts.h"
#include "sidestream/detail/argument_values.h"
#include "sidestream/detail/container_arguments.h"
#include "sidestream/detail/module_arguments.h"
#include "sidestream/detail/refused_arguments.h"
#include "sidestream/detail/struct_arguments.h"
#include "sidestream/owning.h"

/// Internals of `ss::call`, which may change at any time.
namespace sidestream::detail {

/// Compile errors that say what to pass instead of a type that is not allowed as an argument.
template <class T>
constexpr void check_argument() {
  constexpr bool pointer = std::is_pointer_v<T> && !Argument<T>::allowed;
  constexpr bool smart_pointer = IsSmartPointer<T>::value && !Argument<T>::allowed;
  static_assert(
      !Borrows<T>::value || joined<T>,
      "sidestream: an argument of ss::call only borrows its memory, which is gone when the capture runs, at the "
      "next step. Pass the owner of the memory: std::vector<int64_t> in place of at::IntArrayRef or a span, "
      "std::vector<at::Tensor> in place of at::TensorList, std::string in place of std::string_view, the object "
      "in place of std::reference_wrapper");
  static_assert(
      !pointer,
      "sidestream: an argument of ss::call is a pointer, and its target may end or change before the capture runs. "
      "Pass ss::stays(p) for a tensor or a value, and the module itself for a module. Or list the members of a struct "
      "of tensors (sidestream::Members) and pass the pointer as it is. For any other target pass "
      "ss::stays(shared_ptr), which keeps the target, or ss::outlives_engine(p), which promises that the target stays");
  static_assert(!smart_pointer,
                "sidestream: an argument of ss::call is a smart pointer, but not to a module: pass the value, or "
                "ss::stays(shared_ptr), which keeps the target and promises that its content does not change");
  static_assert(
      !IsStdFunction<T>::value,
      "sidestream: an argument of ss::call is a std::function, whose state cannot be compared: pass a function "
      "pointer or a lambda without captures");
  static_assert(!is_module<T>,
                "sidestream: an argument of ss::call is a module: pass it as an object that has a name, a shared_ptr "
                "or a holder, not as a temporary");
  static_assert(
      Argument<T>::allowed || Borrows<T>::value || pointer || smart_pointer || IsStdFunction<T>::value || is_module<T>,
      "sidestream: an argument of ss::call has a type that is neither a tensor, a module, a value that the "
      "library knows (numbers, enums, strings, devices, ...) nor a container of these. For a struct of your own "
      "write `template <> struct sidestream::ArgumentTraits<T> : sidestream::ComparedByValue {};` and give it an "
      "operator==; for a struct with tensors in it write `: sidestream::Members<&T::a, &T::b> {};` instead");
}

template <class T, class = void>
struct PlainPointer {
  using type = T;
};
template <>
struct PlainPointer<char*> {
  using type = const char*;
};
template <class T>
struct PlainPointer<T*, std::enable_if_t<lists_members<std::remove_cv_t<T>>>> {
  using type = StructPointer<std::remove_cv_t<T>>;
};

/// The type that stands for an argument type when it is taken apart: arrays of char become C strings, modules become references, and
/// pointers to structs with listed members become the structs.
template <class T>
using Plain =
    std::conditional_t<std::is_lvalue_reference_v<T> && is_module<std::remove_reference_t<T>>,
                       ModuleReference<std::remove_reference_t<T>>, typename PlainPointer<std::decay_t<T>>::type>;

/// Passes an argument to the function: a module by reference, a struct as a pointer to it, anything else as it is.
template <class T>
const T& pass(const T& value) noexcept {
  return value;
}
template <class M>
M& pass(const ModuleReference<M>& module) noexcept {
  return module.get();
}

template <class T>
const T* pass(const StructPointer<T>& pointer) noexcept {
  return pointer.get();
}
template <class T>
const T* pass(const RebuiltTarget<T>& target) noexcept {
  return target.get();
}

/// Adds a guard for the state of a function. Its type is in the guard of the signature.
template <class F>
void guard_function(const F& function, GuardBuffer& guards) {
  if constexpr (IsOwning<F>::value) {
    guards.push_back(
        {&function, &typeid(F),
         [](const void* a, const void* b) { return static_cast<const F*>(a)->same_as(*static_cast<const F*>(b)); },
         [](const void* v) -> std::shared_ptr<const void> {
           return std::make_shared<const F>(*static_cast<const F*>(v));
         }});
  } else if constexpr (is_function_pointer<F>) {
    guards.push_back(make_guard(function));
  }
}

}  // namespace sidestream::detail
