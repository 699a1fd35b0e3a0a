#pragma once
#include <memory>
#include <string>

#include "sidestream/detail/argument_parts.h"
#include "sidestream/detail/module_forward.h"

namespace sidestream {

/// All modules of the call `name` as one: its own (null for a plain function) and its `arguments`. Null without any.
/// Throws: UsageError for an argument that no shared_ptr owns, unless it is the engine's `model`: nothing says how long it lives.
[[nodiscard]] std::shared_ptr<const torch::nn::Module> modules_of_call(
    const std::string& name, const std::shared_ptr<const torch::nn::Module>& own, const detail::KeptModules& arguments,
    const torch::nn::Module& model);

}  // namespace sidestream
