#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "graphs/capture/whole_step_offload.h"
#include "graphs/gradients/owned_gradients.h"
#include "graphs/resources/engine_resources.h"
#include "graphs/sandbox/leaf_guards.h"
#include "graphs/whole_step/whole_step_watch.h"
#include "sidestream/detail/module_forward.h"
#include "sidestream/graphed_callable.h"

namespace sidestream {

/// What one capture of a whole step runs, in warm-up, capture and eagerly. For each microbatch it runs the step function and computes the
/// gradients of its loss into memory of this object. Then it runs the update.
///
/// Gradients come from autograd::grad. Accumulation into leaves would be captured with the accumulators of eager steps, and would run
/// hooks.
/// Threads: one at a time.
class WholeStepBody {
 public:
  /// A leaf that a loss leads to.
  struct Target {
    at::Tensor parameter;
    OwnedGradient gradient;  ///< of the engine: what any graph adds of this parameter's gradients goes there
  };
  struct Given {
    std::string name;
    TensorFunction function;
    std::shared_ptr<torch::nn::Module> module;
    std::vector<at::Generator> generators = {};
    std::function<void()> update;
    bool accumulate = false;
    bool offload = false;
  };

  /// `counts`: how many inputs each microbatch has. `resources` must outlive this object's runs.
  WholeStepBody(EngineResources& resources, std::shared_ptr<const Given> given, std::vector<std::size_t> counts);

  /// `inputs`: of all microbatches. Returns what the step function returned, without history, one microbatch after the other.
  /// Throws: UsageError (no loss), CaptureError (see WholeStepWatch; a leaf that no warm-up met), errors of the functions.
  Tensors run(const Tensors& inputs);

  /// Call it just before a replay or an eager run, after any capture. Sets the gradients to what autograd would add to. If a backward
  /// adds to `.grad`, that is the existing `.grad` or zeros. Otherwise nothing is set.
  /// Throws: UsageError as refuse_hooks, and if the graph cannot add to the existing `.grad`; nothing is changed then.
  void prepare();
  /// Behind the step: the parameters have the gradients of the eager run, or of the replay.
  void attach_gradients(bool ran_eagerly);
  /// A capture that would have replaced its graph has failed. Frees the device memory and pinned memory of the attempt.
  void abandon_capture() noexcept;
  /// Throws: UsageError if a parameter has gradient hooks, which a graph would not run.
  void refuse_hooks() const;

  /// Counts of the copies of each replay.
  [[nodiscard]] CopyCounts copies() const noexcept { return offload_ != nullptr ? offload_->copies() : CopyCounts{}; }
  /// How many outputs each microbatch gave: in the eager run, or in the capture.
  [[nodiscard]] const std::vector<std::size_t>& output_counts(bool ran_eagerly) const noexcept {
    return ran_eagerly ? output_counts_ : output_counts_in_graph_;
  }

 private:
  class AttachedForUpdate;

  [[nodiscard]] std::vector<at::Tensor> known_leaves() const;
  void prepare_gradients();
  /// Throws: UsageError if the gradient cannot begin with what `.grad` holds.
  void refuse_foreign(const Target& target) const;
  /// Where a captured update adds up over calls. Throws: UsageError.
  void refuse_gradients_of_others() const;
  /// In a warm-up. Throws: CaptureError.
  void refuse_backward_of_its_own() const;
  [[nodiscard]] at::Tensor checked_loss(const Tensors& outputs) const;
  /// The target of `leaf`, made where there was none.
  [[nodiscard]] std::size_t target_of(const at::Tensor& leaf);
  /// Behind an update: those of its parameters that are neither the module's nor the loss's. Throws: as refuse_frozen_gradients.
  void learn_updated(const std::vector<at::Tensor>& parameters);
  /// Throws: UsageError if one of them has a gradient.
  void refuse_frozen_gradients() const;
  /// Behind a capture: weights that are the module's no more, and that it did not reach, are forgotten.
  void drop_replaced();
  void add_gradients(const at::Tensor& loss);
  /// What happens to the saved tensors of a run.
  enum class Saving : std::uint8_t {
    eager,      ///< the engine's step, if there is one
    nowhere,    ///< it stays
    counted,    ///< it stays, and is counted for the capture
    in_capture  ///< it is offloaded inside of the graph
  };
  [[nodiscard]] Saving saving() const;
  void run_microbatches(const Tensors& inputs, Tensors& outputs);
  /// The step function on one microbatch, and the gradients.
  void run_microbatch(const Tensors& inputs, Tensors& outputs);

  EngineResources& resources_;
  std::shared_ptr<const Given> given_;
  std::vector<std::size_t> counts_;
  std::vector<Target> targets_;
  std::optional<HiddenGradients> hidden_;            ///< in a run for a graph
  std::vector<at::Tensor> leaves_;                   ///< all that a call looks at: see known_leaves
  std::vector<at::Tensor> updated_outside_;          ///< see learn_updated
  std::vector<bool> met_;                            ///< targets that got a gradient in the latest run
  std::vector<bool> met_in_graph_;                   ///< in the capture
  std::vector<at::Tensor> leaves_without_in_graph_;  ///< of `leaves_`, those that got none in the capture
  std::vector<std::size_t> output_counts_;           ///< of the latest run
  std::vector<std::size_t> output_counts_in_graph_;
  WholeStepWatch watch_;
  std::shared_ptr<WholeStepOffload> offload_;  ///< null if nothing is offloaded
};

}  // namespace sidestream
