#pragma once
#include <type_traits>
#include <utility>

#include "sidestream/argument_traits.h"
#include "sidestream/detail/argument_parts.h"
#include "sidestream/detail/argument_values.h"
#include "sidestream/detail/refused_arguments.h"

// Compile-time checks of a struct and of its list of members. A failed check says what to do.

/// Internals of `ss::call`, which may change at any time.
namespace sidestream::detail {

/// The Members that the traits of `T` derive from; void if they list none.
template <auto... members>
Members<members...> members_of(const Members<members...>* traits);
void members_of(...);
template <class T>
using MembersOf = decltype(members_of(static_cast<const ArgumentTraits<T>*>(nullptr)));
template <class T>
constexpr bool lists_members = !std::is_void_v<MembersOf<T>>;

/// Type of a listed entry that is not a data member. It is not allowed as an argument.
struct NoMember {
  int value;
};
/// The type of a member, as it is declared.
template <class Pointer>
struct Declared {
  using type = NoMember;
};
template <class C, class M>
struct Declared<M C::*> {
  using type = std::conditional_t<std::is_function_v<M>, NoMember, M>;
};
template <auto member>
using DeclaredType = typename Declared<decltype(member)>::type;
template <auto member>
using MemberType = std::remove_cv_t<DeclaredType<member>>;

template <auto a, auto b>
constexpr bool is_same_member() {
  if constexpr (std::is_same_v<decltype(a), decltype(b)>) {
    return a == b;
  }
  return false;
}
template <auto member, auto... others>
constexpr int count_member = (0 + ... + int(is_same_member<member, others>()));

/// Converts to any type, also to a reference that is not const.
struct Anything {
  template <class T>
  operator T&() const;  // NOLINT: not defined
};

/// True if the aggregate `T` can be initialised with values of the types `Ms`: it has at least as many members.
template <class T, class Void, class... Ms>
struct Initialised : std::false_type {};
template <class T, class... Ms>
struct Initialised<T, std::void_t<decltype(T{std::declval<Ms>()...})>, Ms...> : std::true_type {};
/// True if `T` can be initialised with one value more (`{}`, or a value for a member without a default): it has more members than listed.
template <class T, class Void, class... Ms>
struct InitialisedByMore : Initialised<T, void, Ms..., Anything> {};
template <class T, class... Ms>
struct InitialisedByMore<T, std::void_t<decltype(T{std::declval<Ms>()..., {}})>, Ms...> : std::true_type {};

/// Checks one member; the compiler names it beside the message. False if a check failed.
template <auto member>
constexpr bool check_member() {
  using M = MemberType<member>;
  constexpr bool data = !std::is_same_v<M, NoMember>;
  constexpr bool borrows = Borrows<M>::value && !joined<M>;
  constexpr bool array = std::is_array_v<M>;
  constexpr bool allowed = Argument<std::decay_t<M>>::allowed && !array;
  constexpr bool pointer = (std::is_pointer_v<M> || IsSmartPointer<M>::value) && !allowed;
  constexpr bool set = is_value<std::decay_t<M>> || std::is_assignable_v<DeclaredType<member>&, M>;
  static_assert(data,
                "sidestream: an entry of sidestream::Members is not a data member: list &Struct::member of each data "
                "member that is not static");
  static_assert(!borrows,
                "sidestream: a member in sidestream::Members only borrows its memory, which is gone when the capture "
                "runs, at the next step. Declare it as the owner of the memory: std::vector in place of an ArrayRef "
                "or a span, std::string in place of std::string_view");
  static_assert(!pointer,
                "sidestream: a member in sidestream::Members is a pointer, and its target may end or change before "
                "the capture runs: hold the tensor, the value or the struct itself, or take the pointer out of the "
                "struct and pass it to ss::call as an argument of its own");
  static_assert(!array, "sidestream: a member in sidestream::Members is a C array: declare it as std::array");
  static_assert(!data || borrows || pointer || array || allowed,
                "sidestream: a member in sidestream::Members is neither a tensor, a value that the library knows, a "
                "shared_ptr to a module nor a container of these: give a struct ArgumentTraits of its own, which list "
                "its members or say sidestream::ComparedByValue");
  static_assert(!allowed || set,
                "sidestream: a member in sidestream::Members holds tensors and is const, or cannot be assigned: "
                "declare it without const, because a capture puts other tensors into its copy of the struct");
  return allowed && set;
}

/// Checks the struct itself.
template <class T, auto... members>
constexpr bool check_whole() {
  constexpr bool copied = std::is_class_v<T> && std::is_copy_constructible_v<T>;
  constexpr bool sliced = std::is_polymorphic_v<T> && !std::is_final_v<T>;
  constexpr bool once = ((count_member<members, members...> == 1) && ...);
  static_assert(copied,
                "sidestream: a struct with sidestream::Members cannot be copied, and a captured body gets a copy of "
                "it: give it a copy constructor, or pass its tensors as arguments of their own");
  static_assert(!sliced,
                "sidestream: a struct with sidestream::Members has virtual functions, and a captured body would get a "
                "copy of it without its derived part: declare it final, or pass its tensors as arguments of their own");
  static_assert(once, "sidestream: sidestream::Members lists a member of this struct twice: list each once");
  if constexpr (copied && !sliced && once && std::is_aggregate_v<T>) {
    constexpr bool all = Initialised<T, void, DeclaredType<members>...>::value &&
                         !InitialisedByMore<T, void, DeclaredType<members>...>::value;
    static_assert(all,
                  "sidestream: sidestream::Members leaves out a member of this struct, which a capture would freeze, "
                  "or lists the members in another order than that of their declaration. List all members in the order "
                  "of declaration, those of a base first. Make a member that cannot be listed (a reference, a "
                  "bit-field) a plain one");
    return all;
  }
  return copied && !sliced && once;
}

template <class T, auto... members>
constexpr bool check_struct() {
  constexpr bool good = (check_member<members>() && ...);
  if constexpr (good) {
    return check_whole<T, members...>();
  }
  return false;
}

}  // namespace sidestream::detail
