#pragma once
#include <memory>
#include <type_traits>
#include <typeinfo>

#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include "sidestream/detail/argument_parts.h"

/// Internals of `ss::call`, which may change at any time.
namespace sidestream::detail {

/// A module, compared by its identity. `share` returns shared ownership of it.
inline Guard make_module_guard(const torch::nn::Module* module, std::shared_ptr<const void> (*share)(const void*)) {
  return {module, &typeid(torch::nn::Module), [](const void* kept, const void* given) { return kept == given; }, share};
}

/// A module that is passed by reference.
template <class M>
class ModuleReference {
 public:
  ModuleReference(M& module) noexcept : module_(&module) {}  // NOLINT: passed as the module
  [[nodiscard]] M& get() const noexcept { return *module_; }

 private:
  M* module_;
};

/// Shared ownership of a module. If no shared_ptr owns the module, the result owns nothing (`use_count() == 0`).
inline std::shared_ptr<const torch::nn::Module> share(const torch::nn::Module* module) {
  auto owner = module->weak_from_this().lock();
  return owner != nullptr ? owner : std::shared_ptr<const torch::nn::Module>(owner, module);
}

template <class M>
struct Argument<ModuleReference<M>> {
  static constexpr bool allowed = true;
  struct Kept {
    M* module;
    std::shared_ptr<const torch::nn::Module> owner;
  };
  using Rebuilt = ModuleReference<M>;
  static void flatten(const ModuleReference<M>& value, const Parts& parts) {
    parts.guards.push_back(make_module_guard(&value.get(), [](const void* module) -> std::shared_ptr<const void> {
      return share(static_cast<const torch::nn::Module*>(module));
    }));
  }
  static Kept keep(const ModuleReference<M>& value, KeptModules& modules) {
    modules.push_back(share(&value.get()));
    return {&value.get(), modules.back()};
  }
  static Rebuilt rebuild(const Kept& kept, const at::Tensor*& /*next*/) { return Rebuilt(*kept.module); }
};

/// Smart pointers to modules, holders, AnyModules. `pointer` returns the module or null.
template <class T, const torch::nn::Module* (*pointer)(const T&)>
struct SharedModuleArgument {
  static constexpr bool allowed = true;
  using Kept = T;
  using Rebuilt = const T&;
  static void flatten(const T& value, const Parts& parts) {
    parts.guards.push_back(make_module_guard(pointer(value), [](const void* module) -> std::shared_ptr<const void> {
      return module == nullptr ? nullptr : share(static_cast<const torch::nn::Module*>(module));
    }));
  }
  static Kept keep(const T& value, KeptModules& modules) {
    if (const torch::nn::Module* const module = pointer(value); module != nullptr) {
      modules.push_back(share(module));
    }
    return value;
  }
  static const T& rebuild(const Kept& kept, const at::Tensor*& /*next*/) { return kept; }
};

template <class T>
constexpr bool is_module = std::is_base_of_v<torch::nn::Module, T>;
template <class T>
constexpr bool is_module_holder = torch::detail::is_module_holder<T>::value;

template <class M>
const torch::nn::Module* module_of(const std::shared_ptr<M>& module) {
  return module.get();
}
template <class H>
const torch::nn::Module* held_module(const H& holder) {
  return holder.is_empty() ? nullptr : holder.ptr().get();
}
inline const torch::nn::Module* any_module(const torch::nn::AnyModule& any) {
  return any.is_empty() ? nullptr : any.ptr().get();
}

template <class M>
struct Argument<std::shared_ptr<M>, std::enable_if_t<is_module<M>>>
    : SharedModuleArgument<std::shared_ptr<M>, &module_of<M>> {};
template <class H>
struct Argument<H, std::enable_if_t<is_module_holder<H>>> : SharedModuleArgument<H, &held_module<H>> {};
template <>
struct Argument<torch::nn::AnyModule> : SharedModuleArgument<torch::nn::AnyModule, &any_module> {};

}  // namespace sidestream::detail
