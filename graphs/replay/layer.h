#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <torch/nn/module.h>

#include "graphs/replay/call_state.h"
#include "graphs/replay/input_facts.h"
#include "offload/capture_offload.h"
#include "offload/scope_tree.h"
#include "runtime/runtime.h"
#include "sidestream/call_arguments.h"

namespace sidestream {

/// A call as a function of its tensors.
using Body = std::function<void(const at::Tensor* inputs, detail::TensorBuffer& outputs)>;

/// An output or an input of another layer of the same chain.
struct Link {
  std::size_t layer = 0;
  std::size_t index = 0;  ///< among that layer's outputs or inputs
};

/// One argument of a layer that is to be captured: a sample, or another layer's output.
struct LayerInput {
  at::Tensor sample;                    ///< undefined where `from` says where it comes from
  std::optional<Link> from;             ///< an output of a layer before this one
  bool shared_cast = false;             ///< see has_shared_cast
  std::optional<InputAliases> aliases;  ///< of a call of `ss::call`: these, and its strides, are guards
};

/// What is captured as one forward and one backward graph.
struct LayerSpec {
  std::string name;
  ScopeNode* scope = nullptr;
  Body body;
  std::shared_ptr<const torch::nn::Module> module;  ///< null for a plain function
  std::vector<LayerInput> inputs;
  CallState state;
};

/// Where the forward graph reads one argument, and where the backward graph leaves that argument's gradient.
struct StaticInput {
  at::Tensor tensor;         ///< owned, or the static output that the input is linked to
  std::optional<Link> from;  ///< that output
  bool requires_grad = false;
  bool same_as_earlier = false;  ///< the same tensor as an earlier argument, which gets the whole gradient
  at::Tensor grad;               ///< static, not owning; undefined where there is none
  bool grad_is_seed = false;     ///< `grad` is the linked output's seed: no copy, if it goes there alone
  bool grad_direct = false;      ///< replay: this time it goes to the linked layer's node and nowhere else
};

/// Where the forward graph leaves one result, and where the backward graph reads that result's gradient.
struct StaticOutput {
  at::Tensor tensor;  ///< detached; undefined where the call gave none
  bool requires_grad = false;
  std::vector<Link> readers;      ///< the inputs that are linked to it
  at::Tensor seed;                ///< the static gradient that backward begins from; undefined where none is required
  std::optional<Link> seed_from;  ///< the input whose gradient `seed` is: memory of the pool
  std::uint32_t version = 0;      ///< replay: of the tensor that the latest forward gave
};

/// A parameter whose gradient the backward graph makes.
struct LayerParameter {
  at::Tensor tensor;
  at::Tensor grad;  ///< static gradient; with accumulate_in_graph the `.grad` that the graph owns
};

/// A tensor that a call's backward reads: nobody may write it in between.
struct BackwardRead {
  c10::VariableVersion counter;
  std::string name;
  std::uint32_t at_forward = 0;  ///< replay: its version when the latest forward ran
};

/// One captured call. Owns all that its graphs read. Replay state is the chain's to change.
struct Layer {
  LayerSpec spec;
  bool has_backward = false;
  bool casts = false;  ///< autocast was on somewhere in it: whether its inputs are leaves is a guard
  std::vector<StaticInput> inputs;
  std::vector<StaticOutput> outputs;
  std::vector<LayerParameter> parameters;
  ModuleFacts modules;                  ///< as captured, with the flags of `spec.state`
  std::vector<TensorFacts> watched;     ///< what else of the model it reads
  std::vector<c10::Storage> externals;  ///< read by the capture, neither input, parameter nor buffer
  std::vector<BackwardRead> backward_reads;
  OffloadedStorages offloaded;
  std::uint64_t unplanned_bytes = 0;  ///< of what its capture saved: without a place in the plan
  std::uint64_t refused_bytes = 0;    ///< of what was to leave: stayed, for want of pinned memory
  std::vector<void*> reload_targets;  ///< where the graph before this one's backward puts `offloaded`

  Graph forward;
  Graph backward;
  ExternalEvent forward_done;
  ExternalEvent forward_copies_done;
  ExternalEvent backward_done;
  ExternalEvent backward_copies_done;

  // Replay.
  std::uint64_t generation = 0;  ///< counts forwards
  bool pending = false;          ///< its backward is still to come
};

}  // namespace sidestream
