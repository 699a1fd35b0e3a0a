#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/util/ArrayRef.h>

#include "analysis/sequence_order.h"
#include "graphs/guards/call_modes.h"
#include "graphs/guards/input_facts.h"
#include "graphs/guards/module_facts.h"
#include "offload/scope_tree.h"
#include "sidestream/capture_time_hooks.h"
#include "sidestream/detail/argument_parts.h"
#include "sidestream/detail/module_forward.h"
#include "sidestream/graph_options.h"

namespace sidestream {

/// The state that a call ran in. Its capture runs in the same state, whatever surrounds the capture, and replays only in it.
struct CallState {
  CallModes modes;
  CallModes backward_modes;  ///< of its backward; without autocast, if no backward has been seen
  ModuleFacts modules;       ///< of its module; of the model for a plain function

  /// As it is now, on the calling thread.
  [[nodiscard]] static CallState current(c10::DeviceType type, std::shared_ptr<const torch::nn::Module> module) {
    const CallModes modes = CallModes::current(type);
    return {modes, modes.without_autocast(), ModuleFacts(std::move(module))};
  }
};

/// Sets flags and modes for its lifetime: those that a call had in its forward, or in its backward.
class [[nodiscard]] CallStateGuard {
 public:
  CallStateGuard(const CallState& state, Direction direction)
      : flags_(state.modules), modes_(direction == Direction::forward ? state.modes : state.backward_modes) {}

 private:
  ModelFlagsGuard flags_;
  CallModesGuard modes_;
};

/// A call as a function of its tensors.
using Body = std::function<void(const at::Tensor* inputs, detail::TensorBuffer& outputs)>;

/// An output or an input of another call of the same sequence.
struct Link {
  std::size_t call = 0;
  std::size_t index = 0;  ///< among that call's outputs or inputs
};

/// One argument of a call that will be captured: a sample, or the output of an earlier call.
struct CallInput {
  at::Tensor sample;                    ///< undefined if `from` is set
  std::optional<Link> from;             ///< the output of an earlier call
  at::Tensor like;                      ///< recorded, if `from` is set: the same shape and dtype, on the meta device
  bool on_host = false;                 ///< the sample is a copy on the host: see sample_of
  bool marked = false;                  ///< the recorded output of an earlier call was marked to stay on the device
  bool is_static = false;               ///< earlier graphs read the sample where it is, and new ones may
  bool shared_cast = false;             ///< see has_shared_cast
  std::optional<InputAliases> aliases;  ///< of a call of `ss::call`: the aliases and the strides are guards
};

/// A call that is captured as one forward graph and one backward graph.
struct CallSpec {
  std::string name;
  ScopeNode* scope = nullptr;
  Body body;
  std::shared_ptr<const torch::nn::Module> module;  ///< null for a plain function
  std::vector<CallInput> inputs;
  CallState state;
  std::shared_ptr<const CaptureTimeHooks> hooks = {};  ///< null if there are none
  std::vector<at::Generator> generators =
      {};  ///< that the call may draw from, without the device's default one; each once
  std::vector<bool> outputs_released =
      {};                          ///< outputs that nothing outside of the graphs holds when the next call begins
  std::string chunk = {};          ///< in an order of callables, for errors: " (stage 0, microbatch 1)"
  bool may_lack_backward = false;  ///< the recorded step had a run of it without a backward
};

/// All modules of the call `name` as one: its own (null for a plain function) and its `arguments`. Null without any.
/// Throws: UsageError for an argument that no shared_ptr owns, unless it is the engine's `model`: nothing says how long it lives.
[[nodiscard]] std::shared_ptr<const torch::nn::Module> modules_of_call(
    const std::string& name, const std::shared_ptr<const torch::nn::Module>& own, const detail::KeptModules& arguments,
    const torch::nn::Module& model);

/// A copy of `input`, an argument of a call, for a later capture. The copy is on the host if `input` is on `device`: calls that wait
/// for their capture would otherwise hold much device memory. Waits for the copy. Throws: what the copy throws.
[[nodiscard]] CallInput sample_of(const at::Tensor& input, c10::Device device);
/// The sample of `input`. If the sample is on the host, a copy of it on `device`.
[[nodiscard]] at::Tensor sample_on(c10::Device device, const CallInput& input);

/// Throws: UsageError if one of `inputs`, the arguments or samples of `call`, is sparse or nested: no graph reads it at one address.
void refuse_composite_inputs(const std::string& call, c10::ArrayRef<at::Tensor> inputs);
/// Throws: CaptureError if one of `outputs` is. `call`: "graphed call "x"".
void refuse_composite_outputs(const std::string& call, c10::ArrayRef<at::Tensor> outputs);
/// Throws: UsageError if `module`, or a module below it, has a nested parameter or buffer, to which no replay could compare it.
void refuse_nested_members(const std::string& call, const torch::nn::Module& module);

/// The arguments that the body gets in place of its inputs, for which `leaves` stand. An argument is its leaf, or a tensor of the same
/// memory that is no leaf, as in the call itself.
[[nodiscard]] std::vector<at::Tensor> arguments_of(const CallSpec& spec, const std::vector<at::Tensor>& leaves);

/// Adds the generators that `options` name to each call's generators. Each generator is there once; the default one of `device` is not.
/// Throws: UsageError for an undefined generator and for a generator of another device.
void name_generators(std::vector<CallSpec>& specs, const GraphOptions& options, c10::Device device);

/// The default generator of `device`, then all that `specs` name, each once.
[[nodiscard]] std::vector<at::Generator> generators_of(c10::ArrayRef<CallSpec> specs, c10::Device device);

}  // namespace sidestream
