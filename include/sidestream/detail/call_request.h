#pragma once
#include <cstddef>
#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <torch/nn/module.h>

#include "sidestream/detail/argument_parts.h"
#include "sidestream/detail/export.h"
#include "sidestream/replay_options.h"

/// What `ss::call` is made of. Of no use to a trainer, and it may change at any time.
namespace sidestream::detail {

/// A call as a capture keeps it.
struct KeptCall {
  /// A function of its tensors, with copies of all other arguments.
  std::function<void(const at::Tensor* inputs, TensorBuffer& outputs)> body;
  /// What `CallRequest::structure` is to point to after a replay: what the latest run of `body` gave.
  std::shared_ptr<const void> structure;
  KeptModules modules;  ///< among the arguments
};

/// A call as the engine sees it: taken apart, by reference.
struct CallRequest {
  const torch::nn::Module* module = nullptr;  ///< null for a plain function
  const char* name = nullptr;                 ///< of a plain function
  c10::ArrayRef<at::Tensor> inputs;
  c10::ArrayRef<Guard> guards;
  c10::ArrayRef<std::size_t> shape;
  const void* context = nullptr;  ///< what the two functions below are given
  void (*run)(const void* context,
              TensorBuffer& outputs) = nullptr;     ///< the plain call, now, with the caller's arguments
  KeptCall (*keep)(const void* context) = nullptr;  ///< for a capture
  const void** structure = nullptr;                 ///< where a replay says how its outputs are put together
  const ReplayOptions* replay = nullptr;            ///< of a GraphedCallable: null where none are given
  void (*prepare)(const void* context) = nullptr;   ///< of a GraphedCallable: just before it replays or runs
};

/// True when a step is active on this thread.
[[nodiscard]] SIDESTREAM_API bool step_active() noexcept;
/// Runs `request` as the active engine decides. Throws: as ss::call.
SIDESTREAM_API void dispatch(CallRequest& request, TensorBuffer& outputs);
/// Throws: UsageError that says that ss::call was given no module (or no name).
[[noreturn]] SIDESTREAM_API void refuse_null_module();
[[noreturn]] SIDESTREAM_API void refuse_null_name();

}  // namespace sidestream::detail
