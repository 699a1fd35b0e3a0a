#pragma once
#include <cstddef>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "sidestream/detail/argument_parts.h"
#include "sidestream/detail/argument_values.h"
#include "sidestream/detail/listed_members.h"

/// Internals of `ss::call`, which may change at any time.
namespace sidestream::detail {

/// A struct whose members its ArgumentTraits list: each member is taken apart as an argument of its own.
template <class T, auto... members>
struct StructArgument {
  static constexpr bool allowed = true;
  struct Kept {
    T rest;  ///< a copy without the tensors of listed members; members that are not listed have their values at the capture
    std::tuple<typename Argument<MemberType<members>>::Kept...> listed;
  };
  using Rebuilt = T;

  static void flatten(const T& value, const Parts& parts) {
    (Argument<MemberType<members>>::flatten(value.*members, parts), ...);
  }
  static Kept keep(const T& value, KeptModules& modules) {
    // Braces evaluate from left to right.
    Kept kept{value, {Argument<MemberType<members>>::keep(value.*members, modules)...}};
    TensorBuffer tensors;
    GuardBuffer guards;
    ShapeBuffer shape;
    flatten(value, {tensors, guards, shape});
    tensors.assign(tensors.size(), at::Tensor());
    const at::Tensor* none = tensors.data();
    set(kept.rest, kept, none, Indices());
    return kept;
  }
  static T rebuild(const Kept& kept, const at::Tensor*& next) {
    T result = kept.rest;
    set(result, kept, next, Indices());
    return result;
  }

 private:
  using Indices = std::make_index_sequence<sizeof...(members)>;
  /// Members that are values are already in `rest` and are not assigned, so they may be const.
  template <auto member, class K>
  static void set_one(T& object, const K& kept, const at::Tensor*& next) {
    if constexpr (!is_value<MemberType<member>>) {
      object.*member = Argument<MemberType<member>>::rebuild(kept, next);
    }
  }
  template <std::size_t... i>
  static void set(T& object, const Kept& kept, const at::Tensor*& next, std::index_sequence<i...> /*indices*/) {
    (set_one<members>(object, std::get<i>(kept.listed), next), ...);
  }
};
/// Takes the place of a struct that check_struct has refused, so that the compiler gives no further errors about it.
template <class T>
struct RefusedStruct {
  static constexpr bool allowed = true;
  using Kept = int;
  using Rebuilt = T;
  static void flatten(const T& /*value*/, const Parts& /*parts*/) {}
  static Kept keep(const T& /*value*/, KeptModules& /*modules*/) { return 0; }
  static T rebuild(const Kept& kept, const at::Tensor*& next);  // not defined
};
template <class T, class List>
struct ListedStruct;
template <class T, auto... members>
struct ListedStruct<T, Members<members...>>
    : std::conditional_t<check_struct<T, members...>(), StructArgument<T, members...>, RefusedStruct<T>> {};
template <class T>
struct Argument<T, std::enable_if_t<lists_members<T> && !is_value<T>>> : ListedStruct<T, MembersOf<T>> {};

/// A pointer to such a struct, as an argument. The struct is taken apart instead of the pointer, and the function gets a pointer to const.
template <class T>
class StructPointer {
 public:
  StructPointer(const T* pointer) noexcept : pointer_(pointer) {}  // NOLINT: passed as the pointer
  [[nodiscard]] const T* get() const noexcept { return pointer_; }

 private:
  const T* pointer_;
};
/// Owns the struct to which a captured body gets a pointer.
template <class T>
class RebuiltTarget {
 public:
  explicit RebuiltTarget(std::optional<T> target) : target_(std::move(target)) {}
  [[nodiscard]] const T* get() const noexcept { return target_ ? &*target_ : nullptr; }

 private:
  std::optional<T> target_;  ///< not set for a null pointer
};

template <class T>
struct Argument<StructPointer<T>> {
  static constexpr bool allowed = true;
  using Kept = std::optional<typename Argument<T>::Kept>;
  using Rebuilt = RebuiltTarget<T>;
  static void flatten(const StructPointer<T>& value, const Parts& parts) {
    parts.shape.push_back(value.get() == nullptr ? 0 : 1);
    if (value.get() != nullptr) {
      Argument<T>::flatten(*value.get(), parts);
    }
  }
  static Kept keep(const StructPointer<T>& value, KeptModules& modules) {
    return value.get() == nullptr ? Kept() : Kept(Argument<T>::keep(*value.get(), modules));
  }
  static Rebuilt rebuild(const Kept& kept, const at::Tensor*& next) {
    return Rebuilt(kept ? std::optional<T>(Argument<T>::rebuild(*kept, next)) : std::nullopt);
  }
};

}  // namespace sidestream::detail
