#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include "base/site.h"
#include "graphs/guards/call_state.h"
#include "graphs/guards/input_facts.h"
#include "graphs/outputs/output_set.h"
#include "graphs/outputs/output_storage.h"
#include "graphs/sequence/call_copies.h"
#include "graphs/sequence/node_names.h"
#include "memory/storage_view.h"
#include "offload/saved_tensor_recorder.h"
#include "offload/scope_tree.h"
#include "runtime/runtime.h"
#include "sidestream/capture_time_hooks.h"
#include "sidestream/detail/argument_parts.h"
#include "sidestream/detail/module_forward.h"
#include "sidestream/graph_options.h"
#include "sidestream/replay_options.h"

namespace sidestream {

/// A call as a function of its tensors.
using Body = std::function<void(const at::Tensor* inputs, detail::TensorBuffer& outputs)>;

/// An output or an input of another call of the same sequence.
struct Link {
  std::size_t call = 0;
  std::size_t index = 0;  ///< among that call's outputs or inputs
};

/// One argument of a call that is to be captured: a sample, or another call's output.
struct CallInput {
  at::Tensor sample;                    ///< undefined where `from` says where it comes from
  std::optional<Link> from;             ///< an output of a call before this one
  bool on_host = false;                 ///< the sample is a copy there: see sample_of
  bool shared_cast = false;             ///< see has_shared_cast
  std::optional<InputAliases> aliases;  ///< of a call of `ss::call`: these, and its strides, are guards
};

/// What is captured as one forward and one backward graph.
struct CallSpec {
  std::string name;
  ScopeNode* scope = nullptr;
  Body body;
  std::shared_ptr<const torch::nn::Module> module;  ///< null for a plain function
  std::vector<CallInput> inputs;
  CallState state;
  std::shared_ptr<const CaptureTimeHooks> hooks = {};  ///< null for none
  std::vector<at::Generator> generators = {};  ///< that it may draw from, beside the device's default one; each once
  std::vector<bool> outputs_let_go = {};  ///< those that nobody outside of the graphs holds when the next call begins
};

/// Where the forward graph reads one argument, and where the backward graph leaves that argument's gradient.
struct StaticInput {
  at::Tensor
      tensor;  ///< owned, or the static output that the input is linked to (whose memory may be the pool's again)
  std::optional<Link> from;  ///< that output
  bool requires_grad = false;
  bool same_as_earlier = false;              ///< the same tensor as an earlier argument, which gets the whole gradient
  bool saved = false;                        ///< operators saved it for backward
  VersionStamp version;                      ///< replay: of a linked and saved one, at the latest forward
  OutputSet outputs = all_outputs;           ///< those that lead to it in autograd's graph
  at::Tensor grad;                           ///< static, not owning; undefined where there is none
  bool grad_is_seed = false;                 ///< `grad` is the linked output's seed: no copy, if it goes there alone
  bool grad_direct = false;                  ///< replay: this time it goes to the linked call's node and nowhere else
  std::optional<OutputStorage> memory = {};  ///< of a gradient that may be given out as it is
  StorageView view = {};                     ///< of it
  bool goes_to_leaf = false;                 ///< replay: this time it is, to a leaf that accumulates on the same stream
};

/// Where the forward graph leaves one result, and where the backward graph reads that result's gradient.
struct StaticOutput {
  /// Whose memory it is. Only what the capture itself made is written by replays; all else is given out as plain training would.
  enum class Kind : std::uint8_t {
    none,            ///< undefined
    made,            ///< a view of `output_storages[of]`
    earlier_output,  ///< the same tensor as output `of`
    input,           ///< the same tensor as input `of`
    view_of_input,
    other,  ///< `owner`: a parameter, a buffer
    view_of_other,
  };
  at::Tensor tensor;  ///< detached; undefined where the call gave none
  Kind kind = Kind::none;
  std::size_t of = 0;
  StorageView view;                     ///< of a made one
  std::size_t shares_version_with = 0;  ///< of a made one: the first output of its storage, maybe itself
  at::Tensor owner;
  bool saved = false;             ///< operators saved it for backward
  bool overlaps = false;          ///< with another made one: changed in place, it would change that one's gradient
  bool requires_grad = false;     ///< backward begins from it
  std::vector<Link> readers;      ///< the inputs that are linked to it
  at::Tensor seed;                ///< the static gradient that backward begins from; undefined where none is required
  std::optional<Link> seed_from;  ///< the input whose gradient `seed` is: memory of the pool
  VersionStamp version;           ///< replay: of a saved or overlapping one, at the latest forward
};

/// A parameter whose gradient the backward graph makes.
struct CallParameter {
  at::Tensor tensor;
  GradientPolicy policy = GradientPolicy::cloned;
  at::Tensor grad;                           ///< static gradient; of an accumulated one OwnedGradient::memory
  at::Tensor attached = {};                  ///< of an accumulated one, see OwnedGradient
  std::optional<OutputStorage> memory = {};  ///< of an owned one: what is given out
  StorageView view = {};                     ///< of it
  OutputSet outputs = all_outputs;           ///< those that lead to it in autograd's graph
};

/// A `.grad` that the backward graph adds into, as a replay looks for it. See are_in_place.
struct AccumulatedGradient {
  const c10::TensorImpl* parameter;
  const c10::TensorImpl* attached;  ///< CallParameter::attached: what the `.grad` is in nearly all replays
  const void* memory;               ///< where CallParameter::grad begins
};

/// A tensor that a call's backward reads: nobody may write it in between.
struct BackwardRead {
  c10::VariableVersion counter;
  std::string name;
  std::uint32_t at_forward = 0;  ///< replay: its version when the latest forward ran
};

/// One captured call. Owns all that its graphs read. Replay state is the sequence's to change.
struct CapturedCall {
  CallSpec spec;
  SiteName site;  ///< of its scope, which may be gone: a backward may outlive its engine
  bool has_backward = false;
  bool accumulates = false;      ///< its backward graph adds into the `.grad` of a parameter
  bool owns_gradients = false;   ///< of a parameter or an input it gives out the graph's own memory
  bool placed_by_hooks = false;  ///< its weights lay elsewhere in its passes than behind the capture
  bool casts = false;            ///< autocast was on somewhere in it: whether its inputs are leaves is a guard
  std::vector<StaticInput> inputs;
  // What replays look at, so that none looks for it among the rest. See make_lists.
  std::vector<std::size_t> inputs_with_gradient;
  std::vector<std::size_t> stamped_inputs;  ///< linked, and saved for backward: not copied
  std::vector<StaticOutput> outputs;
  std::vector<OutputStorage> output_storages;  ///< of the outputs that the capture made
  std::vector<CallParameter> parameters;
  std::vector<std::size_t> parameters_with_gradient;  ///< which autograd is given; all others are accumulated
  std::vector<AccumulatedGradient> accumulated;
  ModuleFacts modules;                  ///< as captured, with the flags of `spec.state`
  std::vector<TensorFacts> watched;     ///< what else of the model it reads
  std::vector<c10::Storage> externals;  ///< read by the capture, neither input, parameter nor buffer
  std::vector<BackwardRead> backward_reads;
  CallCopies copies;
  std::uint64_t unplanned_bytes = 0;  ///< of what its capture saved: without a place in the plan
  std::uint64_t refused_bytes = 0;    ///< of what was to leave: stayed, for want of pinned memory

  Graph forward;
  Graph backward;
  ExternalEvent forward_done;
  ExternalEvent backward_done;
  NodeNames forward_names;  ///< of the graphs' nodes
  NodeNames backward_names;

  // Replay.
  bool released = false;           ///< by GraphSequence::release: nothing of it is left
  std::uint64_t generation = 0;    ///< counts forwards
  bool pending = false;            ///< its backward is still to come
  bool backward_launched = false;  ///< since the latest forward: what it saved may be overwritten
  bool backward_failed = false;    ///< behind that launch
  bool grads_in_place = false;     ///< the `.grad`s that it adds into: seen before the latest backward
  ReplayOptions target;            ///< the caller's, of the latest forward: its backward goes there too

  /// Each place of a gradient in the graphs' own memory that is given out; empty where there is none.
  template <class Visit>
  void for_each_given_gradient(const Visit& visit) {
    for (StaticInput& input : inputs) {
      visit(input.memory);
    }
    for (CallParameter& parameter : parameters) {
      visit(parameter.memory);
    }
  }
  /// Of gradients of inputs that the graphs hold memory for, and that nobody was given since the latest forward.
  [[nodiscard]] std::int64_t ungiven_bytes() const noexcept {
    std::size_t bytes = 0;
    for (const StaticInput& input : inputs) {
      bytes += input.memory && !(input.goes_to_leaf && backward_launched) ? input.memory->captured().nbytes() : 0;
    }
    return static_cast<std::int64_t>(bytes);
  }
  /// Behind the captures.
  void make_lists() {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].requires_grad) {
        inputs_with_gradient.push_back(i);
      }
      if (inputs[i].saved && inputs[i].from) {
        stamped_inputs.push_back(i);
      }
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const CallParameter& parameter = parameters[i];
      if (parameter.policy != GradientPolicy::accumulated) {
        parameters_with_gradient.push_back(i);
      } else {
        accumulated.push_back({parameter.tensor.unsafeGetTensorImpl(), parameter.attached.unsafeGetTensorImpl(),
                               parameter.grad.const_data_ptr()});
      }
    }
  }
};

}  // namespace sidestream
