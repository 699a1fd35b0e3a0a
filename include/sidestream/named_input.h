#pragma once
#include <string_view>
#include <utility>

#include <ATen/core/Tensor.h>

namespace sidestream {

/// One argument of GraphedCallable::call, by name. The name must live until that call returns.
struct NamedInput {
  /// Written as `{"x", x}` in a call.
  NamedInput(std::string_view its_name, at::Tensor its_tensor) : name(its_name), tensor(std::move(its_tensor)) {}
  std::string_view name;  ///< one of Callable::input_names
  at::Tensor tensor;      ///< undefined only if it was undefined at the capture
};

}  // namespace sidestream
