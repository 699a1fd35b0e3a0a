#pragma once
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "analysis/copy_places.h"
#include "analysis/sequence_order.h"
#include "graphs/capture/body_hooks.h"
#include "graphs/capture/capture_reads.h"
#include "graphs/capture/captured_use.h"
#include "graphs/capture/node_naming.h"
#include "graphs/capture/sizing_pass.h"
#include "graphs/outputs/output_liveness.h"
#include "graphs/outputs/storage_holders.h"
#include "graphs/sequence/graph_sequence.h"
#include "offload/saved_tensor_recorder.h"

namespace sidestream {

class AddedGradients;

/// Captures the graphs of one sequence: warm-up, plan, forwards in order, backwards in reverse.
///
/// sequence_preparation.cpp holds what comes before the first capture, forward_capture.cpp and backward_capture.cpp the captures,
/// kept_tensors.cpp what comes after the last one.
class SequenceCapture {
 public:
  /// Warms up and captures. Nothing is left of it when it throws. Capture: illegal. Throws: as make_graphed_callables.
  [[nodiscard]] static std::shared_ptr<GraphSequence> make_sequence(const GraphResources& resources,
                                                                    std::vector<CallSpec> specs,
                                                                    const GraphOptions& options);

 private:
  SequenceCapture(CapturedSequence& sequence, const GraphResources& resources, std::vector<CallSpec> specs);
  void run();

  /// What exists only while capturing.
  struct Live {
    std::vector<at::Tensor> leaves;       ///< static inputs as autograd sees them
    std::vector<at::Tensor> arguments;    ///< what the body is given for them; only until the forward is captured
    std::vector<at::Tensor> outputs;      ///< with their autograd history
    std::vector<at::Tensor> grad_inputs;  ///< owning
    PlannedPass planned;
    std::unique_ptr<SavedTensorRecorder> recorder;
    GradientScopes scopes;  ///< of the forward
  };

  /// Calls whose backward starts within the lag are not offloaded: backward needs them immediately.
  void make_plan_and_pin();
  /// For calls that save `selected` bytes.
  [[nodiscard]] CopyWindow window_for(const std::vector<std::uint64_t>& selected) const;
  void prepare_calls();
  /// The graphs of `call` will read its weights where they lie now.
  static void take_facts(CapturedCall& call);
  /// After its hooks have run for its backward. Throws: CaptureError if its weights lie elsewhere than for its forward.
  void check_hooked_weights(std::size_t index) const;
  /// After all captures and hooks: notes which weights the hooks have put elsewhere.
  void settle_hooked_weights();
  /// From now on each replay compares `tensor`, which `call` reads and its module does not have.
  static void watch(CapturedCall& call, const at::Tensor& tensor);
  /// Of an accumulated gradient: the `.grad` that the backward graph adds into.
  [[nodiscard]] OwnedGradient prepare_grad(const CapturedCall& call, const at::Tensor& parameter);
  /// The calls, and what exists while capturing.
  void register_holders();
  /// Each once, also if calls share it, and also those that get no gradient.
  [[nodiscard]] std::vector<at::Tensor> all_parameters() const;

  /// Tells Options::progress.
  void say(ProgressPhase phase, std::size_t index, std::size_t call) const;
  void record_caller_event();
  /// Keeps what the latest capture read from elsewhere alive as long as `call`.
  void hold_reads(CapturedCall& call);
  /// Gives tensors that modules keep of their capture a value: see Note [Tensors that a module keeps].
  void fill_kept_tensors();
  /// The report tells which calls keep what they make.
  void note_kept(const std::vector<CaptureReads::Made>& kept);
  /// Throws: CaptureError if a body keeps an output whose memory other graphs use by now.
  void refuse_released(const std::vector<CaptureReads::Made>& kept) const;
  /// Throws: CaptureError if a body replaces a tensor that it reads by a new one.
  void refuse_replaced(const std::vector<CaptureReads::Made>& kept) const;
  void capture_forward(std::size_t index);
  /// Makes the static inputs as the body gets them; links those that are outputs of earlier calls.
  void make_leaves(std::size_t index);
  /// Lets an input that is another call's output read that output's memory, if that call makes the output at each replay.
  void link(StaticInput& input, const Link& reader);
  /// The input of the next call that alone reads `output` of call `index`, if the gradient it gets there can be handed on as
  /// the output's seed without a copy, and is no other output's seed; else null.
  [[nodiscard]] StaticInput* giver_of_seed(std::size_t index, const StaticOutput& output);
  void prepare_seeds(std::size_t index);
  void capture_backward(std::size_t index);
  /// Which outputs lead to the gradients of `targets`: of inputs that require one, then of parameters.
  static void learn_routes(CapturedCall& call, const Live& live, const std::vector<at::Tensor>& targets);
  /// Learns how long the sequence needs the tensors that the forward of call `index` made and read.
  void learn_lives(std::size_t index, const SavedStorages& saved);
  /// Frees memory for the captures from here on: the sources of copies that are done before the graph at `graph_index`, and outputs that
  /// the sequence needs no more.
  void release(std::size_t graph_index);
  /// After the last capture: in shared memory later sequences compute where the outputs are.
  void share_outputs();
  /// Inside the capture of a backward: allocates the targets of reloads that may be queued from here on.
  void allocate_targets(std::size_t index);
  /// Takes the gradients of inputs, and of parameters that were not `added` into `.grad`. `added` may be null.
  void take_gradients(CapturedCall& call, Live& live, std::vector<at::Tensor>& grads, const AddedGradients* added);
  void finish_backward(std::size_t index);

  CapturedSequence& sequence_;
  const GraphResources& resources_;
  Runtime& runtime_;
  const SequenceOrder& order_;
  std::vector<CallSpec> specs_;
  std::vector<CallSizing> sizings_;
  std::vector<CopyPlaces> copy_places_;
  CaptureReads reads_;
  CapturedUse use_;
  CapturedHistory history_;
  StorageHolders holders_;
  OutputLiveness lives_;
  c10::Stream capture_;
  std::vector<Live> live_;
  std::optional<SharedSlots::Share>
      shared_slots_;  ///< in shared memory: the slots on the host that this sequence takes
};

}  // namespace sidestream
