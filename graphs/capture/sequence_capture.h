#pragma once
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "analysis/copy_places.h"
#include "graphs/capture/body_hooks.h"
#include "graphs/capture/capture_reads.h"
#include "graphs/capture/captured_use.h"
#include "graphs/capture/node_naming.h"
#include "graphs/capture/output_liveness.h"
#include "graphs/capture/sizing_pass.h"
#include "graphs/sequence/graph_sequence.h"
#include "offload/saved_tensor_recorder.h"

namespace sidestream {

class AddedGradients;

/// Builds one sequence: warm-up, plan, forwards in order, backwards in reverse.
///
/// sequence_preparation.cpp holds what comes before the first capture, forward_capture.cpp and backward_capture.cpp the captures,
/// kept_tensors.cpp what comes after the last.
class SequenceCapture {
 public:
  /// Warms up and captures. Nothing is left of it when it throws. Capture: illegal. Throws: as make_graphed_callables.
  [[nodiscard]] static std::shared_ptr<GraphSequence> make_sequence(const GraphResources& resources,
                                                                    std::vector<CallSpec> specs,
                                                                    const GraphOptions& options);

 private:
  SequenceCapture(GraphSequence& sequence, const GraphResources& resources, std::vector<CallSpec> specs);
  void run();

  /// What exists only while capturing.
  struct Live {
    std::vector<at::Tensor> leaves;       ///< static inputs as autograd sees them
    std::vector<at::Tensor> outputs;      ///< with their autograd history
    std::vector<at::Tensor> grad_inputs;  ///< owning
    PlannedPass planned;
    std::unique_ptr<SavedTensorRecorder> recorder;
    GradientScopes scopes;  ///< of the forward
  };

  /// What turns round within the lag stays.
  void make_plan_and_pin();
  [[nodiscard]] std::size_t calls_deep() const;
  /// For calls that save `selected` bytes: as the options have it, else by the measured pace of calls and link.
  [[nodiscard]] CopyWindow window_for(const std::vector<std::uint64_t>& selected) const;
  void prepare_calls();
  /// Where the weights of `call` lie now is where its graphs read them.
  static void take_facts(CapturedCall& call);
  /// Its hooks have run for its backward. Throws: CaptureError where its weights lie elsewhere than for its forward.
  void check_hooked_weights(std::size_t index) const;
  /// All captures are done, and all hooks have run: what became of weights that hooks put elsewhere.
  void settle_hooked_weights();
  /// What `call` reads, and its module does not have, is compared before each replay.
  static void watch(CapturedCall& call, const at::Tensor& tensor);
  /// Of an accumulated one: the `.grad` that the backward graph adds into.
  [[nodiscard]] OwnedGradient prepare_grad(const CapturedCall& call, const at::Tensor& parameter);
  /// Each once, also where calls share it, and those that no gradient reaches.
  [[nodiscard]] std::vector<at::Tensor> all_parameters() const;

  /// To whoever listens.
  void say(ProgressPhase phase, std::size_t index, std::size_t call) const;
  void record_caller_event();
  /// What the latest capture read from elsewhere lives as long as `call`.
  void hold_reads(CapturedCall& call);
  /// What modules keep of the tensors that their capture made gets its value: see Note [Tensors that a module keeps].
  void fill_kept_tensors();
  /// The report tells which calls keep what they make.
  void note_kept(const std::vector<CaptureReads::Made>& kept);
  /// Throws: CaptureError where a body keeps an output whose memory other graphs use by now.
  void refuse_released(const std::vector<CaptureReads::Made>& kept) const;
  /// Throws: CaptureError where a body replaces by a new tensor what it reads.
  void refuse_replaced(const std::vector<CaptureReads::Made>& kept) const;
  void capture_forward(std::size_t index);
  /// The static inputs as the body gets them; those that are an earlier call's outputs are linked.
  void make_leaves(std::size_t index);
  /// An input that is another call's output reads that output's memory, where the call itself makes it at each replay.
  void link(StaticInput& input, const Link& reader);
  /// The input of the next call that alone reads `output` of call `index`, if the gradient it gets there can be handed on as
  /// the output's seed without a copy, and is no other output's seed; else null.
  [[nodiscard]] StaticInput* giver_of_seed(std::size_t index, const StaticOutput& output);
  void prepare_seeds(std::size_t index);
  void capture_backward(std::size_t index);
  /// Which outputs lead to the gradients of `targets`: of inputs that require one, then of parameters.
  static void learn_routes(CapturedCall& call, const Live& live, const std::vector<at::Tensor>& targets);
  /// Learns how long the sequence needs what the forward of call `index` made and read.
  void learn_lives(std::size_t index, const SavedStorages& saved, const std::vector<at::Tensor>& arguments);
  /// What the captures from here on may use again: the sources of copies that the graph at `graph_index` is behind, and outputs that nothing
  /// of the sequence needs any more.
  void release(std::size_t graph_index);
  /// Inside a backward's capture: allocates what is to be brought back from here on.
  void allocate_targets(std::size_t index);
  /// Of the inputs, and of the parameters where they were not `added` (null) into `.grad`.
  void take_gradients(CapturedCall& call, Live& live, std::vector<at::Tensor>& grads, const AddedGradients* added);
  void finish_backward(std::size_t index);

  GraphSequence& sequence_;
  const GraphResources& resources_;
  Runtime& runtime_;
  std::vector<CallSpec> specs_;
  std::vector<CallSizing> sizings_;
  std::vector<CopyPlaces> copy_places_;
  CaptureReads reads_;
  CapturedUse use_;
  CapturedHistory history_;
  OutputLiveness lives_;
  c10::Stream capture_;
  std::vector<Live> live_;
  std::optional<SharedSlots::Share>
      shared_slots_;  ///< in shared memory: what this sequence takes of its slots on the host
};

}  // namespace sidestream
