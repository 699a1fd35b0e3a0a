#pragma once
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>

#include "sidestream/detail/argument_values.h"

namespace sidestream {

/// Result of ss::owning: a function that owns its state. Copies share the state.
template <class F>
class Owning {
 public:
  /// Use ss::owning.
  explicit Owning(F function) : state_(std::make_shared<const F>(std::move(function))) {}

  /// Calls the function.
  template <class... Args>
  decltype(auto) operator()(Args&&... args) const {
    return (*state_)(std::forward<Args>(args)...);
  }
  /// True for copies of one object, and if the bytes of the state show that it is the same.
  [[nodiscard]] bool same_as(const Owning& other) const noexcept {
    if constexpr (std::is_empty_v<F>) {  // its one byte says nothing
      return true;
    } else if constexpr (std::is_trivially_copyable_v<F>) {
      return state_ == other.state_ || std::memcmp(state_.get(), other.state_.get(), sizeof(F)) == 0;
    } else {
      return state_ == other.state_;
    }
  }

 private:
  std::shared_ptr<const F> state_;
};

/// Wraps a function with state (a lambda with captures, a std::function) for ss::call and Callable, which refuse such functions otherwise.
///
/// The function is copied once, and captures share the copy. The caller promises two things. First, the function owns copies of all that it
/// uses: no references, and no pointers to memory that may change or be freed. Second, it does the same work each time, because a capture
/// bakes in its state. Pass what changes from call to call as an argument.
/// Make the object once and pass the same one each time. If its state cannot be compared by its bytes, a new object needs a new capture.
template <class F>
[[nodiscard]] Owning<std::decay_t<F>> owning(F&& function) {
  return Owning<std::decay_t<F>>(std::forward<F>(function));
}

namespace detail {

template <class T>
struct IsOwning : std::false_type {};
template <class F>
struct IsOwning<Owning<F>> : std::true_type {};

/// Functions that a capture may run later: they have no state, or own it.
template <class F>
constexpr bool is_keepable_function = is_stateless<F> || is_function_pointer<F> || IsOwning<F>::value;

}  // namespace detail
}  // namespace sidestream
