#pragma once
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>

#include "sidestream/detail/argument_values.h"

namespace sidestream {

/// What ss::owning gives: a function whose state is its own. Copies share it.
template <class F>
class Owning {
 public:
  explicit Owning(F function) : state_(std::make_shared<const F>(std::move(function))) {}

  template <class... Args>
  decltype(auto) operator()(Args&&... args) const {
    return (*state_)(std::forward<Args>(args)...);
  }
  /// True for the same object, and where the bytes of what was captured tell that it is the same.
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

/// Wraps a function with state (a lambda with captures, a std::function) for ss::call and Callable, which take none otherwise.
/// It is copied once, and shared by captures. The caller promises that it owns copies of all that it uses, no references and no
/// pointers to what may change or end, and that it gives the same work each time: a capture bakes in what it holds. Make it once
/// and pass the same object: one made anew, of state that cannot be compared by its bytes, is another capture.
/// What changes from call to call is an argument, not state.
template <class F>
[[nodiscard]] Owning<std::decay_t<F>> owning(F&& function) {
  return Owning<std::decay_t<F>>(std::forward<F>(function));
}

namespace detail {

template <class T>
struct IsOwning : std::false_type {};
template <class F>
struct IsOwning<Owning<F>> : std::true_type {};

/// Functions that a capture may run later: without state, or with state of their own.
template <class F>
constexpr bool is_keepable_function = is_stateless<F> || is_function_pointer<F> || IsOwning<F>::value;

}  // namespace detail
}  // namespace sidestream
