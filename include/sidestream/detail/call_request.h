#pragma once
#include <cstddef>
#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "sidestream/detail/argument_parts.h"
#include "sidestream/detail/export.h"
#include "sidestream/detail/module_forward.h"
#include "sidestream/replay_options.h"

/// Internals of `ss::call`, which may change at any time.
namespace sidestream::detail {

/// A call as a capture keeps it.
struct KeptCall {
  /// Runs the call on given tensors, with copies of all other arguments.
  std::function<void(const at::Tensor* inputs, TensorBuffer& outputs)> body;
  /// The structure of the latest result of `body`. After a replay, `CallRequest::structure` points to it.
  std::shared_ptr<const void> structure;
  KeptModules modules;  ///< the modules among the arguments
};

/// A call as the engine sees it: taken apart, by reference.
struct CallRequest {
  const torch::nn::Module* module = nullptr;  ///< null for a plain function
  const char* name = nullptr;                 ///< name of a plain function
  c10::ArrayRef<at::Tensor> inputs;
  c10::ArrayRef<Guard> guards;
  c10::ArrayRef<std::size_t> shape;
  const void* context = nullptr;  ///< argument of the functions below
  void (*run)(const void* context,
              TensorBuffer& outputs) = nullptr;     ///< runs the plain call now, with the caller's arguments
  KeptCall (*keep)(const void* context) = nullptr;  ///< keeps the call for a capture
  const void** structure = nullptr;                 ///< where a replay puts the structure of its outputs
  const ReplayOptions* replay = nullptr;            ///< of a GraphedCallable; null if it has none
  void (*prepare)(const void* context) = nullptr;   ///< of a GraphedCallable: called just before it replays or runs
};

/// True when a step is active on this thread.
[[nodiscard]] SIDESTREAM_API bool step_active() noexcept;
/// Runs `request` as the engine of the active step decides. Throws: as ss::call.
SIDESTREAM_API void dispatch(CallRequest& request, TensorBuffer& outputs);
/// Throws UsageError: ss::call was given no module (or no name).
[[noreturn]] SIDESTREAM_API void refuse_null_module();
[[noreturn]] SIDESTREAM_API void refuse_null_name();

}  // namespace sidestream::detail
