#pragma once
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "analysis/copy_places.h"
#include "analysis/sequence_order.h"
#include "graphs/capture/body_hooks.h"
#include "graphs/capture/capture_reads.h"
#include "graphs/capture/node_naming.h"
#include "graphs/capture/warmup.h"
#include "graphs/gradients/backward_split.h"
#include "graphs/gradients/call_gradients.h"
#include "graphs/outputs/output_liveness.h"
#include "graphs/outputs/storage_holders.h"
#include "graphs/sequence/graph_sequence.h"
#include "graphs/sequence/pool_use.h"
#include "offload/saved_tensor_recorder.h"

namespace sidestream {

/// Captures the graphs of one sequence: warm-up, plan, then forwards and backwards in `order`, whose runs are `specs`, each call once.
/// Nothing is left of it when it throws.
/// Capture: illegal.  Throws: as make_graphed_callables.
[[nodiscard]] std::shared_ptr<GraphSequence> capture_sequence(const GraphResources& resources,
                                                              std::vector<CallSpec> specs, SequenceOrder order,
                                                              const GraphOptions& options);

/// The state of a sequence's capture, for the functions below. sequence_preparation.cpp has those that come before the first capture,
/// kept_tensors.cpp the one that comes after the last.
struct SequenceCapture {
  /// What exists of a call only while capturing.
  struct Live {
    std::vector<at::Tensor> leaves;       ///< static inputs as autograd sees them
    std::vector<at::Tensor> arguments;    ///< what the body is given for them; only until the forward is captured
    std::vector<at::Tensor> outputs;      ///< with their autograd history
    std::vector<at::Tensor> grad_inputs;  ///< owning
    BackwardSplit split;                  ///< of a call with delayed parameters
    std::vector<at::Tensor> computed;     ///< gradients of delayed parameters, which its backward computes
    PlannedPass planned;
    std::unique_ptr<SavedTensorRecorder> recorder;
    NodeNaming::Scopes scopes;  ///< of the forward
  };

  /// Both must outlive this object. Its holders are the calls, and what exists while capturing.
  SequenceCapture(CapturedSequence& captured, const GraphResources& of_engine, std::vector<CallSpec> given);

  /// Frees memory for the captures from the one at `graph_index` on: the sources of copies that are done before it, and outputs that the
  /// sequence needs no more.
  void release_before(std::size_t graph_index);
  /// Inside of a capture: GraphOptions::cuda_graph_event, if it is set.
  void record_caller_event() const;

  CapturedSequence& sequence;
  const GraphResources& resources;
  Runtime& runtime;
  const SequenceOrder& order;
  std::vector<CallSpec> specs;
  PolicyOf policy_of;
  std::vector<CallSizing> sizings;
  CaptureReads reads;
  PoolUse::Measurement use;
  std::optional<PoolUse::Measurement> weights_use;  ///< of the graphs of delayed parameters
  CapturedHistory history;
  StorageHolders holders;
  OutputLiveness lives;
  c10::Stream stream;
  std::vector<Live> live;                          ///< by call
  std::vector<std::size_t> former;                 ///< by call: see former_runs
  std::optional<SharedSlots::Share> shared_slots;  ///< in shared memory: the slots on the host that this sequence takes
};

// The steps of a capture. They throw as capture_sequence.

/// After the warm-up. Calls whose backward starts within the lag are not offloaded: backward needs them immediately.
[[nodiscard]] std::vector<CopyPlaces> make_plan_and_pin(SequenceCapture& capture);
/// Gives the calls their static inputs and parameters, and the places of their copies.
void prepare_calls(SequenceCapture& capture, const std::vector<CopyPlaces>& places);
void capture_forward(SequenceCapture& capture, std::size_t index);
void capture_backward(SequenceCapture& capture, std::size_t index);
/// First of all in the capture of the graph at `graph_index`: allocates the targets of reloads that may be queued from here on. Work
/// before this graph may have used that memory; this graph and those that follow may not.
void allocate_targets(SequenceCapture& capture, std::size_t graph_index);
/// Of one call: see CaptureOffload.
void allocate_targets(SequenceCapture& capture, CapturedCall::Copies& copies, bool for_weights);
/// No graph from here on reads the gradients of inputs that the graph at `graph_index` made, if it is a backward: the one that follows
/// it has ended, or is a forward.
void drop_gradients_of(SequenceCapture& capture, std::size_t graph_index);
/// At its place in the order: the graph of call `index` for its delayed parameters, if it has any. Frees what only that graph reads.
void capture_weights(SequenceCapture& capture, std::size_t index);
/// In the capture of a backward of a call with delayed parameters: runs the first part. Returns the gradients of `targets`, which are the
/// inputs' leaves, then the parameters; those that the second part computes are undefined.
[[nodiscard]] std::vector<at::Tensor> run_first_part(SequenceCapture& capture, std::size_t index,
                                                     const std::vector<at::Tensor>& roots,
                                                     const std::vector<at::Tensor>& targets,
                                                     const std::vector<at::Tensor>& seeds);
/// After the last capture: gives tensors that modules keep of their capture a value, see Note [Tensors that a module keeps].
void fill_kept_tensors(SequenceCapture& capture);

/// Sorts the outputs of the captured body of `call` by whose memory they are. `leaves`: its inputs. `saved`: the storages that autograd
/// saved in it.
/// Throws: CaptureError for a view that a replay cannot make again of its own inputs.
void learn_outputs(CapturedCall& call, const std::vector<at::Tensor>& leaves, const detail::TensorBuffer& outputs,
                   const SavedStorages& saved, const Exclusions& exclusions);
/// Checks the graph of call `index` that was captured last: see graph_check.h.
void check_captured(const SequenceCapture& capture, std::size_t index, Direction direction);
/// The graphs of `call` will read its weights where they lie now.
void take_facts(CapturedCall& call);
/// From now on each replay compares `tensor`, which `call` reads and its module does not have.
void watch_tensor(CapturedCall& call, const at::Tensor& tensor);
/// Keeps what the latest capture read from elsewhere alive as long as `call`.
void hold_reads(CaptureReads& reads, CapturedCall& call);
/// Each once, also if calls share it, and also those that get no gradient.
[[nodiscard]] std::vector<at::Tensor> all_parameters(const CapturedSequence& sequence);

}  // namespace sidestream
