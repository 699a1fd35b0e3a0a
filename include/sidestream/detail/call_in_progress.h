#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>

#include "sidestream/detail/call_arguments.h"
#include "sidestream/detail/call_buffers.h"
#include "sidestream/detail/call_request.h"
#include "sidestream/detail/call_results.h"

/// Internals of `ss::call`, which may change at any time.
namespace sidestream::detail {

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

/// Forward of an AnyModule. It refers to the caller's AnyModule; a copy of it (for a capture) owns an AnyModule that shares the module.
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

/// What a call returns, by value.
template <class Function, class... Args>
using ResultOf =
    std::decay_t<decltype(std::invoke(std::declval<const Function&>(), pass(std::declval<const Args&>())...))>;

/// One call, on the stack of its caller.
template <class Function, class... Args>
struct CallInProgress {
  using R = ResultOf<Function, Args...>;
  using Structure = typename Argument<R>::Kept;

  const Function& function;
  std::tuple<const Args&...> arguments;
  mutable std::optional<Structure> structure;  ///< structure of the result of an eager run

  static void run(const void* context, TensorBuffer& outputs) {
    const auto& call = *static_cast<const CallInProgress*>(context);
    const R result =
        std::apply([&](const Args&... args) -> R { return std::invoke(call.function, pass(args)...); }, call.arguments);
    call.structure.emplace(take_apart(result, outputs));
  }

  static KeptCall keep(const void* context) {
    const auto& call = *static_cast<const CallInProgress*>(context);
    KeptCall kept;
    const auto structure = std::make_shared<Structure>();
    kept.structure = structure;
    kept.body = [function = call.function, structure,
                 arguments = std::apply(
                     [&](const Args&... args) {
                       // Braces evaluate from left to right, the order in which the arguments were taken apart.
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
      *structure = take_apart(result, outputs);
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
    using R = ResultOf<Function, Args...>;
    check_result<R>();
    if (!step_active()) {
      return R(std::invoke(function, pass(args)...));
    }
    if constexpr (returnable<R>) {
      using Call = CallInProgress<Function, Args...>;
      const Call call{function, std::tuple<const Args&...>(args...), std::nullopt};
      const void* replayed = nullptr;
      CallRequest request;
      request.module = module;
      request.name = name;
      const LentBuffers buffers;
      buffers->guards.push_back(make_signature_guard<void(Function, Args...)>());
      guard_function(function, buffers->guards);
      const Parts parts{buffers->inputs, buffers->guards, buffers->shape};
      (Argument<Args>::flatten(args, parts), ...);
      request.inputs = buffers->inputs;
      request.guards = buffers->guards;
      request.shape = buffers->shape;
      request.context = &call;
      request.run = &Call::run;
      request.keep = &Call::keep;
      request.structure = &replayed;
      dispatch(request, buffers->outputs);
      const at::Tensor* next = buffers->outputs.data();
      return R(Argument<R>::rebuild(
          replayed != nullptr ? *static_cast<const typename Call::Structure*>(replayed) : *call.structure, next));
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

}  // namespace sidestream::detail
