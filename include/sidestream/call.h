#pragma once
#include <memory>
#include <type_traits>
#include <utility>

#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include "sidestream/detail/call_arguments.h"
#include "sidestream/detail/call_in_progress.h"

namespace sidestream {

/// Calls `module->forward(args...)`. Without an active step on this thread it does nothing else.
///
/// In a step, the call is also a scope, named as the model's `named_modules()` names the module. If Options::graph names the call, it
/// becomes a graph: the first step runs it eagerly and measures it, and later steps replay it. A module that is not part of the engine's
/// model runs as without a step.
///
/// Arguments: tensors, and containers of them, are inputs. Numbers, enums, strings, containers of these, and structs with
/// ss::ArgumentTraits are values. Values are guards: they are compared with those at the capture (CallOptions::on_new_arguments). A struct
/// whose traits list its Members goes by value or by pointer: its tensors are inputs, its values guards. Wrap other pointers in ss::stays.
/// Modules are watched like the called one. An argument that only borrows its memory (at::IntArrayRef, std::string_view) does not compile.
/// Results: tensors, and containers of them.
///
/// Under no_grad the call runs eagerly, or replays a graph of the forward alone if CallOptions::on_evaluation is `capture`. With
/// gradients it runs eagerly if the module is in eval mode. It always runs eagerly in inference mode and inside a backward.
/// Ordering: on return the current stream waits for the call's compute, not for its copies.
/// Capture: legal only if the call runs eagerly.  Threads: the step's.
/// Throws: UsageError (wrong inputs, a pending backward, a null module), and whatever forward throws.
template <class M, class... Args, class = std::enable_if_t<std::is_base_of_v<torch::nn::Module, M>>>
auto call(M* module, Args&&... args) {
  return detail::call_module(module, static_cast<const detail::Plain<Args&&>&>(args)...);
}

/// Calls the module of a ModuleHolder (`TORCH_MODULE`).
template <class M, class... Args>
auto call(const torch::nn::ModuleHolder<M>& holder, Args&&... args) {
  return call(holder.is_empty() ? nullptr : holder.ptr().get(), std::forward<Args>(args)...);
}

/// Calls a module that a std::shared_ptr owns.
template <class M, class... Args, class = std::enable_if_t<std::is_base_of_v<torch::nn::Module, M>>>
auto call(const std::shared_ptr<M>& module, Args&&... args) {
  return call(module.get(), std::forward<Args>(args)...);
}

/// Calls the module of an AnyModule, whose forward returns `R`.
template <class R = at::Tensor, class... Args>
R call(torch::nn::AnyModule& any, Args&&... args) {
  if (any.is_empty()) {
    detail::refuse_null_module();
  }
  return detail::call_function(any.ptr().get(), nullptr, detail::AnyForward<R>(any),
                               static_cast<const detail::Plain<Args&&>&>(args)...);
}

/// Calls a plain function; the call's name is `name`. The function is a function pointer, a member function (its object is the first
/// argument), a lambda without captures, or ss::owning(...). Pass everything that it uses as arguments, modules too.
template <class Function, class... Args>
auto call(const char* name, const Function& function, Args&&... args) {
  using F = std::decay_t<Function>;
  constexpr bool module = detail::is_module<F> || detail::is_module_holder<F>;
  static_assert(!module,
                "sidestream: ss::call was given a name and a module: leave out the name, ss::call(module, ...). A "
                "module has the name that the model's named_modules() give it");
  static_assert(
      detail::is_keepable_function<F> || module,
      "sidestream: the function given to ss::call holds state (a lambda with captures, a std::function, an object "
      "with members). A capture would freeze that state, and may outlive it. Pass what the function uses as arguments, "
      "modules too, to a lambda without captures, or wrap it in ss::owning(...), which promises that it owns its "
      "state");
  if (name == nullptr || *name == '\0') {
    detail::refuse_null_name();
  }
  if constexpr (detail::is_keepable_function<F>) {
    const F kept = function;
    return detail::call_function(nullptr, name, kept, static_cast<const detail::Plain<Args&&>&>(args)...);
  }
}

}  // namespace sidestream
