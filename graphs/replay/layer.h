#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <torch/nn/module.h>

#include "offload/capture_offload.h"
#include "offload/scope_tree.h"
#include "runtime/runtime.h"
#include "sidestream/call_arguments.h"

namespace sidestream {

/// A call as a function of its tensors.
using Body = std::function<void(const at::Tensor* inputs, detail::TensorBuffer& outputs)>;

/// One argument of a layer that is to be captured: a sample, or another layer's output.
struct LayerInput {
  at::Tensor sample;  ///< undefined where `from_layer` says where it comes from
  std::int64_t from_layer = -1;
  std::int64_t from_output = 0;
};

/// What is captured as one forward and one backward graph.
struct LayerSpec {
  std::string name;
  ScopeNode* scope = nullptr;
  Body body;
  std::shared_ptr<const torch::nn::Module> module;  ///< null for a plain function
  std::vector<LayerInput> inputs;
};

/// A static input: where the forward graph reads one argument.
struct StaticInput {
  at::Tensor tensor;  ///< owned, or a linked layer's static output
  bool linked = false;
  bool requires_grad = false;
};

/// A parameter whose gradient the backward graph makes.
struct LayerParameter {
  at::Tensor tensor;
  at::Tensor grad;  ///< static gradient; with accumulate_in_graph the `.grad` that the graph owns
};

/// A storage that the graphs read at an address, and that may move under them.
struct WatchedTensor {
  at::Tensor tensor;
  const void* address = nullptr;
};

/// One captured call. Owns all that its graphs read. Replay state is the chain's to change.
struct Layer {
  LayerSpec spec;
  bool training = true;
  bool has_backward = false;
  std::vector<StaticInput> inputs;
  std::vector<at::Tensor> outputs;  ///< static, detached; undefined ones kept
  std::vector<bool> output_requires_grad;
  std::vector<LayerParameter> parameters;
  std::vector<WatchedTensor> watched;    ///< parameters and buffers
  std::vector<c10::Storage> externals;   ///< read by the capture, neither input, parameter nor buffer
  std::vector<at::Tensor> grad_outputs;  ///< static, for outputs that require a gradient
  std::vector<at::Tensor> grad_inputs;   ///< static, not owning; undefined where there is none
  std::vector<bool> grad_input_linked;   ///< is the linked layer's static grad_output: no copy, if it goes there alone
  OffloadedStorages offloaded;
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
  std::vector<std::uint32_t> output_versions;
  std::vector<bool> grad_input_direct;  ///< this time it goes to the linked layer's node and nowhere else
};

}  // namespace sidestream
