#pragma once
#include <cstdint>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>

namespace sidestream::sim {

/// What the operator side needs to know of an operator, worked out once from its schema.
struct OperatorInfo {
  enum class Kind : std::uint8_t { plain, tensor, tensor_list, optional_tensor_list, generator, device };
  struct Argument {
    Kind kind = Kind::plain;
    bool written = false;     ///< by the schema or by the table of known liars
    bool may_resize = false;  ///< an out argument
  };

  c10::OperatorName key{"", ""};
  const char* name = "";  ///< lives as long as the process
  std::vector<Argument> arguments;
  std::vector<int> returns;   ///< index of the written argument that a return is, or -1
  bool returns_view = false;  ///< of an argument that it does not write
  bool has_cpu_kernel = true;
  bool random = false;      ///< draws from a generator
  bool draws_vary = false;  ///< by how much it moves the generator on depends on data, or on the generator's state
  bool takes_generator = false;
  bool host_needs_result = false;  ///< a value or a shape that the host must know: synchronises on CUDA
  bool waits_on_devices =
      false;  ///< and there is no GPU on which it does not: assertions are checked there on the device
};

/// The information of `op`; the reference stays valid. Threads: any.
[[nodiscard]] const OperatorInfo& info_of(const c10::OperatorHandle& op);

}  // namespace sidestream::sim
