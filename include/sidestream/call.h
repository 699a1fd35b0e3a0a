#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include "sidestream/call_arguments.h"
#include "sidestream/call_results.h"
#include "sidestream/export.h"

namespace sidestream {

/// What the templates below are made of. Of no use to a trainer, and it may change at any time.
namespace detail {

/// A call as a capture keeps it.
struct KeptCall {
  /// A function of its tensors, with copies of all other arguments.
  std::function<void(const at::Tensor* inputs, TensorBuffer& outputs)> body;
  /// What `CallRequest::structure` is to point to after a replay: what the latest run of `body` gave.
  std::shared_ptr<const void> structure;
  KeptModules modules;  ///< among the arguments
};

/// A call as the engine sees it: taken apart, by reference, on the caller's stack.
struct CallRequest {
  const torch::nn::Module* module = nullptr;  ///< null for a plain function
  const char* name = nullptr;                 ///< of a plain function
  TensorBuffer inputs;
  GuardBuffer guards;
  ShapeBuffer shape;
  const void* context = nullptr;  ///< what the two functions below are given
  void (*run)(const void* context,
              TensorBuffer& outputs) = nullptr;     ///< the plain call, now, with the caller's arguments
  KeptCall (*keep)(const void* context) = nullptr;  ///< for a capture
  const void** structure = nullptr;                 ///< where a replay says how its outputs are put together
};

/// True when a step is active on this thread.
[[nodiscard]] SIDESTREAM_API bool step_active() noexcept;
/// Runs `request` as the active engine decides. Throws: as ss::call.
SIDESTREAM_API void dispatch(CallRequest& request, TensorBuffer& outputs);
/// Throws: UsageError that says that ss::call was given no module (or no name).
[[noreturn]] SIDESTREAM_API void refuse_null_module();
[[noreturn]] SIDESTREAM_API void refuse_null_name();

/// The forward of a module.
template <class M>
struct Forward {
  M* module;
  template <class... Args>
  decltype(auto) operator()(Args&&... args) const {
    return module->forward(std::forward<Args>(args)...);
  }
};

template <class M, class Arguments, class = void>
struct HasForward : std::false_type {};
template <class M, class... Args>
struct HasForward<M, std::tuple<Args...>,
                  std::void_t<decltype(std::declval<M&>().forward(pass(std::declval<const Args&>())...))>>
    : std::true_type {};

/// Forward of an AnyModule: refers to the caller's until it is copied (kept), then owns a copy that shares the module.
template <class R>
class AnyForward {
 public:
  explicit AnyForward(torch::nn::AnyModule& any) : any_(&any) {}
  AnyForward(const AnyForward& other) : own_(std::make_shared<torch::nn::AnyModule>(*other.any_)), any_(own_.get()) {}
  AnyForward& operator=(const AnyForward&) = delete;
  ~AnyForward() = default;

  template <class... Args>
  R operator()(const Args&... args) const {
    return any_->template forward<R>(args...);
  }

 private:
  std::shared_ptr<torch::nn::AnyModule> own_;
  torch::nn::AnyModule* any_;
};

/// One call on its caller's stack.
template <class Function, class... Args>
struct CallInProgress {
  using R = std::decay_t<decltype(std::invoke(std::declval<const Function&>(), pass(std::declval<const Args&>())...))>;
  using Structure = typename Result<R>::Structure;

  const Function& function;
  std::tuple<const Args&...> arguments;
  mutable std::optional<Structure> structure;  ///< of a run's result

  static void run(const void* context, TensorBuffer& outputs) {
    const auto& call = *static_cast<const CallInProgress*>(context);
    const R result =
        std::apply([&](const Args&... args) -> R { return std::invoke(call.function, pass(args)...); }, call.arguments);
    Result<R>::flatten(result, outputs);
    call.structure.emplace(Result<R>::structure(result));
  }

  static KeptCall keep(const void* context) {
    const auto& call = *static_cast<const CallInProgress*>(context);
    KeptCall kept;
    const auto structure = std::make_shared<Structure>();
    kept.structure = structure;
    kept.body = [function = call.function, structure,
                 arguments = std::apply(
                     [&](const Args&... args) {
                       // Braces: evaluated from left to right, as the arguments were taken apart.
                       return std::tuple<typename Argument<Args>::Kept...>{Argument<Args>::keep(args, kept.modules)...};
                     },
                     call.arguments)](const at::Tensor* next, TensorBuffer& outputs) {
      const auto rebuilt = std::apply(
          [&next](const auto&... args) {
            return std::tuple<typename Argument<Args>::Rebuilt...>{Argument<Args>::rebuild(args, next)...};
          },
          arguments);
      const R result =
          std::apply([&](const auto&... args) -> R { return std::invoke(function, pass(args)...); }, rebuilt);
      Result<R>::flatten(result, outputs);
      *structure = Result<R>::structure(result);
    };
    return kept;
  }
};

template <class Function, class... Args>
auto call_function(const torch::nn::Module* module, const char* name, const Function& function, const Args&... args) {
  (check_argument<Args>(), ...);
  constexpr bool invocable = std::is_invocable_v<const Function&, decltype(pass(std::declval<const Args&>()))...>;
  static_assert(invocable,
                "sidestream: the function given to ss::call cannot be called with these arguments (values, strings and "
                "pointers are passed on as const)");
  if constexpr (invocable && (Argument<Args>::allowed && ...)) {
    using Call = CallInProgress<Function, Args...>;
    using R = typename Call::R;
    check_result<R>();
    if (!step_active()) {
      return R(std::invoke(function, pass(args)...));
    }
    const Call call{function, std::tuple<const Args&...>(args...), std::nullopt};
    const void* replayed = nullptr;
    CallRequest request;
    request.module = module;
    request.name = name;
    request.guards.push_back(make_signature_guard<void(Function, Args...)>());
    guard_function(function, request.guards);
    const Parts parts{request.inputs, request.guards, request.shape};
    (Argument<Args>::flatten(args, parts), ...);
    request.context = &call;
    request.run = &Call::run;
    request.keep = &Call::keep;
    request.structure = &replayed;
    TensorBuffer outputs;
    dispatch(request, outputs);
    const at::Tensor* next = outputs.data();
    const auto& structure =
        replayed != nullptr ? *static_cast<const typename Call::Structure*>(replayed) : *call.structure;
    if constexpr (Result<R>::allowed) {
      return Result<R>::rebuild(structure, next);
    }
  }
}

template <class M, class... Args>
auto call_module(M* module, const Args&... args) {
  (check_argument<Args>(), ...);
  static_assert(
      !std::is_same_v<std::remove_cv_t<M>, torch::nn::Module>,
      "sidestream: ss::call was given a torch::nn::Module, which has no forward (the element of a ModuleList is "
      "one): name its type, ss::call(block->as<Block>(), ...), or hold the blocks in a torch::nn::Sequential");
  static_assert(
      HasForward<M, std::tuple<Args...>>::value || std::is_same_v<std::remove_cv_t<M>, torch::nn::Module>,
      "sidestream: the forward of the module given to ss::call cannot be called with these arguments (values, "
      "strings and pointers are passed on as const)");
  if constexpr (HasForward<M, std::tuple<Args...>>::value) {
    if (module == nullptr) {
      refuse_null_module();
    }
    return call_function(module, nullptr, Forward<M>{module}, args...);
  }
}

}  // namespace detail

/// Calls `module->forward(args...)`. Without an active step on this thread that is all. In a step it is a scope named as
/// the model's named_modules() name it, and a graph where the options say so: the first step runs eagerly and counts, from
/// the second on it replays.
///
/// Arguments: tensors, and containers with tensors in them, are inputs. Values (numbers, enums, strings, and containers of them;
/// a struct of the trainer's by ss::ArgumentTraits) are guards, compared with what a capture holds: a new value is another
/// capture, eager or an error, by option. Modules are watched as the call's own. Pointers are wrapped in ss::stays. What only
/// borrows its memory (at::IntArrayRef, std::string_view) does not compile.
/// Results: tensors, and containers of them.
/// Under no_grad, and when the module is in eval mode, it runs eagerly. A module that is not part of the engine's model runs as
/// without a step.
/// Ordering: on return the current stream waits for the call's compute, not for its copies.  Capture: legal only eager.
/// Threads: the step's.  Throws: UsageError (wrong inputs, pending backward, a null module), and what forward throws.
template <class M, class... Args, class = std::enable_if_t<std::is_base_of_v<torch::nn::Module, M>>>
auto call(M* module, Args&&... args) {
  return detail::call_module(module, static_cast<const detail::Plain<Args&&>&>(args)...);
}

/// The same for a ModuleHolder (`TORCH_MODULE`).
template <class M, class... Args>
auto call(const torch::nn::ModuleHolder<M>& holder, Args&&... args) {
  return call(holder.is_empty() ? nullptr : holder.ptr().get(), std::forward<Args>(args)...);
}

/// The same for a shared module.
template <class M, class... Args, class = std::enable_if_t<std::is_base_of_v<torch::nn::Module, M>>>
auto call(const std::shared_ptr<M>& module, Args&&... args) {
  return call(module.get(), std::forward<Args>(args)...);
}

/// The same for an AnyModule, whose forward gives `R`.
template <class R = at::Tensor, class... Args>
R call(torch::nn::AnyModule& any, Args&&... args) {
  if (any.is_empty()) {
    detail::refuse_null_module();
  }
  return detail::call_function(any.ptr().get(), nullptr, detail::AnyForward<R>(any),
                               static_cast<const detail::Plain<Args&&>&>(args)...);
}

/// The same for a plain function, under the name given: a function pointer, a member function (its object is the first argument),
/// a lambda without captures, or ss::owning(...). What it uses is passed as arguments, modules too.
template <class Function, class... Args>
auto call(const char* name, const Function& function, Args&&... args) {
  using F = std::decay_t<Function>;
  constexpr bool module = detail::is_module<F> || detail::is_module_holder<F>;
  static_assert(!module,
                "sidestream: ss::call was given a name and a module: a module is called without a name, "
                "ss::call(module, ...), and is named as the model's named_modules() name it");
  static_assert(
      detail::is_keepable_function<F> || module,
      "sidestream: the function given to ss::call holds state (a lambda with captures, a std::function, an object "
      "with members), which a capture would freeze and may outlive: pass what it uses as arguments, modules too, "
      "to a lambda without captures, or wrap it in ss::owning(...), which promises that it owns its state");
  if (name == nullptr || *name == '\0') {
    detail::refuse_null_name();
  }
  if constexpr (detail::is_keepable_function<F>) {
    const F kept = function;
    return detail::call_function(nullptr, name, kept, static_cast<const detail::Plain<Args&&>&>(args)...);
  }
}

}  // namespace sidestream
