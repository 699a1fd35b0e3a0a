#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/ArrayRef.h>

#include "base/site.h"
#include "graphs/gradients/call_gradients.h"
#include "graphs/guards/call_spec.h"
#include "graphs/outputs/output_storage.h"
#include "graphs/outputs/static_tensors.h"
#include "graphs/outputs/storage_holders.h"
#include "graphs/sequence/node_names.h"
#include "offload/captured_copies.h"
#include "runtime/handles.h"
#include "sidestream/chunk.h"
#include "sidestream/replay_options.h"

namespace sidestream {

/// An output whose memory goes back to the pool before the last capture, and the index of the first graph that may use the memory again.
struct ReleasedOutput {
  std::size_t graph_index = 0;
  Link output;  ///< its index: among the output storages of the call
};

/// A tensor that a call's backward reads: no code may write it between forward and backward.
struct BackwardRead {
  c10::VariableVersion counter;
  std::string name;
  std::uint32_t at_forward = 0;  ///< replay: its version when the latest forward ran
};

/// One captured call: what it is, what its graphs read and write, the graphs, and the state of its replays, which only its sequence
/// changes. Owns all that its graphs read.
struct CapturedCall {
  /// The copies of one call of a sequence, and the graphs that they lie between, as graph indices of the sequence's order.
  struct Copies {
    CapturedCopies captured;
    std::size_t released_at = 0;        ///< index of the first graph that may use the sources' memory again
    std::size_t reload_at = 0;          ///< index of the graph from which on only the reload uses the targets' memory
    bool allocated = false;             ///< the targets, since that graph's capture
    std::size_t weights_reload_at = 0;  ///< the same of targets for its weights graph, by rank of weights graphs
    bool weights_allocated = false;
    Event offloaded;  ///< recorded after the latest copies to the host
    Event reloaded;   ///< recorded after the latest copies to the device
  };

  /// What the graphs of a call read, except its inputs and parameters, as it was at the capture.
  struct Reads {
    ModuleFacts modules;                  ///< with the flags of the call's state
    std::vector<TensorFacts> watched;     ///< other tensors of the model
    std::vector<c10::Storage> externals;  ///< neither input, parameter nor buffer
    std::vector<BackwardRead> in_backward;
  };

  /// One captured graph.
  struct OneGraph {
    Graph graph;
    ExternalEvent done;
    NodeNames names;  ///< of its nodes
  };

  /// Indices into the lists of a call, so that no replay searches these. See make_lists.
  struct Lists {
    std::vector<std::size_t> inputs_with_gradient;
    std::vector<std::size_t> stamped_inputs;            ///< linked, and saved for backward: not copied
    std::vector<std::size_t> parameters_with_gradient;  ///< which autograd is given; all others are accumulated
    std::vector<std::size_t> delayed_parameters;
    std::vector<AccumulatedGradient> accumulated;
  };

  /// The state of a call's replays.
  struct Replay {
    bool released = false;           ///< by GraphSequence::release: nothing of the call is left
    std::uint64_t generation = 0;    ///< counts forwards
    bool backward_launched = false;  ///< since the latest forward: what it saved may be overwritten
    bool backward_failed = false;    ///< after that launch
    bool given_up = false;           ///< since the latest forward: a call before it ran its backward first
    /// Gradients of delayed parameters are to come. The latest backward ran on this stream.
    std::optional<c10::Stream> weights_delayed;
    OutputSet used = 0;       ///< the outputs that got a gradient in it
    std::uint64_t chunk = 0;  ///< of the latest forward, by its number, if gradients are delayed or in an order; else 0
    std::optional<ChunkId> chunk_id;  ///< of that chunk, if the sequence is captured in the order of a step
    bool ran_eagerly = false;         ///< since the latest forward: what is linked to its outputs gets other tensors
    std::optional<c10::Stream> grads_kept_for;  ///< the latest stream that their memory is kept for
    ReplayOptions target;                       ///< the caller's at the latest forward; its backward uses it too
  };

  CallSpec spec;
  SiteName site;  ///< of its scope, which may be gone: a backward may outlive its engine
  bool has_backward = false;
  bool delays = false;           ///< gradients of some parameters come after its backward
  bool accumulates = false;      ///< its backward graph adds into the `.grad` of a parameter
  bool owns_gradients = false;   ///< of a parameter or an input it gives out the graph's own memory
  bool placed_by_hooks = false;  ///< its weights lay elsewhere in its passes than after the capture
  bool casts = false;            ///< autocast was on somewhere in it: whether its inputs are leaves is a guard
  std::vector<StaticInput> inputs;
  std::vector<StaticOutput> outputs;
  std::vector<OutputStorage> output_storages;  ///< of the outputs that the capture made
  std::vector<CallParameter> parameters;
  Lists lists;
  Reads reads;
  Copies copies;
  std::uint64_t unplanned_bytes = 0;  ///< saved by its capture, but not in the plan
  std::uint64_t refused_bytes = 0;    ///< planned to be offloaded, but kept because pinned memory was short
  OneGraph forward;
  OneGraph backward;
  OneGraph weights;  ///< computes the gradients of delayed parameters; no graph if the backward computes all of them
  Replay replay;

  /// Adds the references that the call has to what it reads and to what it gives out.
  void tell(KnownReferences& references) const {
    for (const StaticInput& input : inputs) {
      references.add(input.tensor);
    }
    for (const StaticOutput& output : outputs) {
      references.add(output.tensor);
      references.add(output.owner);
    }
    for (const OutputStorage& held : output_storages) {
      references.add(held.captured());
    }
    for (const c10::Storage& held : reads.externals) {
      references.add(held);
    }
    for (const auto& saved : copies.captured.storages) {
      references.add(*saved);
    }
  }
  /// Visits the memory of each gradient that may be given out in the graphs' own memory; empty if there is none.
  template <class Visit>
  void for_each_given_gradient(const Visit& visit) {
    for (StaticInput& input : inputs) {
      visit(input.memory);
    }
    for (CallParameter& parameter : parameters) {
      visit(parameter.memory);
    }
  }
  /// Bytes of input gradients that the graphs hold memory for and that were not given out since the latest forward.
  [[nodiscard]] std::int64_t ungiven_bytes() const noexcept {
    std::size_t bytes = 0;
    for (const StaticInput& input : inputs) {
      bytes +=
          input.memory && !(input.goes_to_leaf && replay.backward_launched) ? input.memory->captured().nbytes() : 0;
    }
    return static_cast<std::int64_t>(bytes);
  }
  /// After a forward that was given `given` and made `made`: notes the versions of the tensors that the backward graph reads at the
  /// caller's own addresses.
  void stamp_versions(c10::ArrayRef<at::Tensor> given, const detail::TensorBuffer& made);
  /// After the captures.
  void make_lists() {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].requires_grad) {
        lists.inputs_with_gradient.push_back(i);
      }
      if (inputs[i].saved && inputs[i].from) {
        lists.stamped_inputs.push_back(i);
      }
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const CallParameter& parameter = parameters[i];
      if (parameter.policy == GradientPolicy::delayed) {
        lists.delayed_parameters.push_back(i);
      } else if (parameter.policy != GradientPolicy::accumulated) {
        lists.parameters_with_gradient.push_back(i);
      } else {
        lists.accumulated.push_back({parameter.tensor.unsafeGetTensorImpl(), parameter.attached.unsafeGetTensorImpl(),
                                     parameter.grad.const_data_ptr()});
      }
    }
  }
};

/// The calls of a sequence, in the order of their captures. Counts how often a call is looked at. So a test can show that the work of a
/// step is linear in its calls, and that no replay looks at all of them.
/// Threads: as a vector; the count is right if one thread looks at a time.
class CapturedCalls {
 public:
  CapturedCalls() = default;
  CapturedCalls(CapturedCalls&& other) noexcept : all_(std::move(other.all_)), looks_(other.looks()) {}
  CapturedCalls& operator=(CapturedCalls&&) = delete;
  ~CapturedCalls() = default;

  [[nodiscard]] CapturedCall& operator[](std::size_t index) {
    count(1);
    return all_[index];
  }
  [[nodiscard]] const CapturedCall& operator[](std::size_t index) const {
    count(1);
    return all_[index];
  }
  /// For loops over all calls: all are counted.
  [[nodiscard]] auto begin() {
    count(all_.size());
    return all_.begin();
  }
  [[nodiscard]] auto begin() const {
    count(all_.size());
    return all_.begin();
  }
  [[nodiscard]] auto end() { return all_.end(); }
  [[nodiscard]] auto end() const { return all_.end(); }
  [[nodiscard]] const CapturedCall& front() const { return (*this)[0]; }
  [[nodiscard]] std::size_t size() const noexcept { return all_.size(); }
  void resize(std::size_t size) { all_.resize(size); }

  [[nodiscard]] std::uint64_t looks() const noexcept { return looks_.load(std::memory_order_relaxed); }

 private:
  void count(std::size_t looks) const noexcept {  // a store is enough: no replay pays for a locked addition
    looks_.store(looks_.load(std::memory_order_relaxed) + looks, std::memory_order_relaxed);
  }

  std::vector<CapturedCall> all_;
  mutable std::atomic<std::uint64_t> looks_{0};
};

}  // namespace sidestream
