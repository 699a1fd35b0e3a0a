#pragma once
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include "sidestream/call_arguments.h"
#include "sidestream/export.h"

namespace sidestream {

/// What the templates below are made of. Of no use to a trainer, and it may change at any time.
namespace detail {

/// A call as the engine sees it: taken apart, by reference, on the caller's stack.
struct CallRequest {
  const torch::nn::Module* module = nullptr;  ///< null for a plain function
  const char* name = nullptr;                 ///< of a plain function
  TensorBuffer inputs;
  GuardBuffer guards;
  ShapeBuffer shape;
  const void* context = nullptr;  ///< what the two functions below are given
  void (*run)(const void* context,
              TensorBuffer& outputs) = nullptr;  ///< the plain call, now, with the caller's arguments
  /// The call as a function of its tensors, with copies of all other arguments: what a capture runs.
  std::function<void(const at::Tensor* inputs, TensorBuffer& outputs)> (*keep)(const void* context) = nullptr;
};

/// True when a step is active on this thread.
[[nodiscard]] SIDESTREAM_API bool step_active() noexcept;
/// Runs `request` as the active engine decides. Throws: as ss::call.
SIDESTREAM_API void dispatch(CallRequest& request, TensorBuffer& outputs);

template <class T>
using Plain = std::conditional_t<std::is_array_v<std::remove_reference_t<T>>, const char*, std::decay_t<T>>;

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

template <class Function, class... Args>
auto call_function(const torch::nn::Module* module, const char* name, const Function& function, const Args&... args) {
  using R = std::decay_t<decltype(function(args...))>;
  if (!step_active()) {
    return function(args...);
  }
  auto parts = std::forward_as_tuple(function, args...);
  CallRequest request;
  request.module = module;
  request.name = name;
  (Argument<Args>::flatten(args, request.inputs, request.guards, request.shape), ...);
  request.context = &parts;
  request.run = [](const void* context, TensorBuffer& outputs) {
    const auto& held = *static_cast<const decltype(parts)*>(context);
    Result<R>::flatten(std::apply([](const Function& f, const Args&... a) { return f(a...); }, held), outputs);
  };
  request.keep = [](const void* context) -> std::function<void(const at::Tensor*, TensorBuffer&)> {
    const auto& held = *static_cast<const decltype(parts)*>(context);
    return std::apply(
        [](const Function& f, const Args&... a) -> std::function<void(const at::Tensor*, TensorBuffer&)> {
          return [f, kept = std::tuple<Args...>(Argument<Args>::stripped(a)...)](const at::Tensor* next,
                                                                                 TensorBuffer& outputs) {
            // Braces: evaluated from left to right, as the tensors were taken apart.
            auto rebuilt = std::apply(
                [&next](const Args&... prototype) {
                  return std::tuple<Args...>{Argument<Args>::rebuild(prototype, next)...};
                },
                kept);
            Result<R>::flatten(std::apply(f, rebuilt), outputs);
          };
        },
        held);
  };
  TensorBuffer outputs;
  dispatch(request, outputs);
  return Result<R>::rebuild(outputs);
}

}  // namespace detail

/// Calls `module->forward(args...)`. Without an active step on this thread that is all. In a step it is a scope named as
/// the model's named_modules() name it, and a graph where the options say so: the first step runs eagerly and counts, from
/// the second on it replays. Arguments: tensors, optionals and vectors of them are inputs; all others are guards, compared by
/// value (a new value is another capture, eager or an error, by option); pointers are wrapped in ss::stays.
/// Under no_grad, and when the module is in eval mode, it runs eagerly.
/// Ordering: on return the current stream waits for the call's compute, not for its copies.  Capture: legal only eager.
/// Threads: the step's.  Throws: UsageError (wrong inputs, pending backward beyond the bound, a module the model does not
/// have), and what forward throws.
template <class M, class... Args>
auto call(M* module, Args&&... args)
    -> std::enable_if_t<std::is_base_of_v<torch::nn::Module, M>,
                        std::decay_t<decltype(module->forward(static_cast<const detail::Plain<Args>&>(args)...))>> {
  return detail::call_function(
      module, nullptr, [module](const detail::Plain<Args>&... a) { return module->forward(a...); },
      static_cast<const detail::Plain<Args>&>(args)...);
}

/// The same for a ModuleHolder (`TORCH_MODULE`).
template <class M, class... Args>
auto call(const torch::nn::ModuleHolder<M>& holder, Args&&... args) {
  return call(holder.ptr().get(), std::forward<Args>(args)...);
}

/// The same for a shared module.
template <class M, class... Args, class = std::enable_if_t<std::is_base_of_v<torch::nn::Module, M>>>
auto call(const std::shared_ptr<M>& module, Args&&... args) {
  return call(module.get(), std::forward<Args>(args)...);
}

/// The same for an AnyModule, whose forward gives `R`.
template <class R = at::Tensor, class... Args>
R call(torch::nn::AnyModule& any, Args&&... args) {
  return detail::call_function(any.ptr().get(), nullptr, detail::AnyForward<R>(any),
                               static_cast<const detail::Plain<Args>&>(args)...);
}

/// The same for a plain function, under the name given (a literal; it must outlive the engine).
template <class Function, class... Args>
auto call(const char* name, const Function& function, Args&&... args) {
  return detail::call_function(nullptr, name, function, static_cast<const detail::Plain<Args>&>(args)...);
}

}  // namespace sidestream
