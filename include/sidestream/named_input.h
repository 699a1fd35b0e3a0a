#pragma once
#include <string_view>
#include <utility>

#include <ATen/core/Tensor.h>

namespace sidestream {

/// One argument of GraphedCallable::call. The name is borrowed for that call.
struct NamedInput {
  NamedInput(std::string_view its_name, at::Tensor its_tensor) : name(its_name), tensor(std::move(its_tensor)) {}
  std::string_view name;
  at::Tensor tensor;  ///< may be undefined, where it was at the capture
};

}  // namespace sidestream
