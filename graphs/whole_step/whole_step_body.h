#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include "graphs/capture/whole_step_offload.h"
#include "graphs/gradients/call_gradients.h"
#include "graphs/resources/engine_resources.h"
#include "graphs/sandbox/sandbox.h"
#include "graphs/whole_step/whole_step_watch.h"
#include "sidestream/detail/module_forward.h"
#include "sidestream/graphed_callable.h"

namespace sidestream {

/// The code that one capture of a whole step runs, in its warm-up, in its capture and eagerly. For each microbatch it runs the step
/// function and computes the gradients of the loss into memory that this object owns. Then it runs the update.
///
/// Gradients come from autograd::grad. If autograd accumulated into leaves instead, the accumulators of eager steps would be captured,
/// and hooks would run.
/// Threads: one at a time.
class WholeStepBody {
 public:
  /// A leaf that a loss leads to.
  struct Target {
    at::Tensor parameter;
    OwnedGradient gradient;  ///< owned by the engine: all graphs that add gradients of this parameter add there
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

  /// `inputs`: of all microbatches, in order. Returns the outputs of the step function, without history, in the same order.
  /// Throws: UsageError (no loss), CaptureError (see WholeStepWatch; a leaf that no warm-up met), and what the functions throw.
  Tensors run(const Tensors& inputs);

  /// Call just before a replay or an eager run, after any capture. If the step accumulates, it initialises gradients with `.grad`, or
  /// with zeros.
  /// Throws: UsageError as refuse_hooks, and if the graph cannot add to a `.grad`; nothing is changed then.
  void prepare();
  /// Call after the step: gives the parameters the gradients of the eager run, or of the replay.
  void attach_gradients(bool ran_eagerly);
  /// Call after a failed capture: frees the device memory and the pinned memory that it took.
  void abandon_capture() noexcept;
  /// Throws: UsageError if a parameter has gradient hooks, which a graph would not run.
  void refuse_hooks() const;

  /// The copies of each replay.
  [[nodiscard]] CopyCounts copies() const noexcept { return offload_ != nullptr ? offload_->copies() : CopyCounts{}; }
  /// The number of outputs of each microbatch: in the eager run, or in the capture.
  [[nodiscard]] const std::vector<std::size_t>& output_counts(bool ran_eagerly) const noexcept {
    return ran_eagerly ? output_counts_ : output_counts_in_graph_;
  }

 private:
  class AttachedForUpdate;

  [[nodiscard]] std::vector<at::Tensor> known_leaves() const;
  /// The target of `leaf`; makes it if there is none.
  [[nodiscard]] std::size_t target_of(const at::Tensor& leaf);
  /// Call after an update: notes its parameters that are neither in the module nor reached by the loss. Throws: as
  /// refuse_frozen_gradients.
  void learn_updated(const std::vector<at::Tensor>& parameters);
  /// Throws: UsageError if one of those parameters has a gradient.
  void refuse_frozen_gradients() const;
  /// Call after a capture: forgets weights that are no longer in the module and that the capture did not reach.
  void drop_replaced();
  using WeakLeaf = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  /// Of a leaf that is no target yet.
  struct NewGradient {
    WeakLeaf leaf;
    at::Tensor grad;
  };
  void add_gradient(const at::Tensor& leaf, const at::Tensor& grad);
  /// Adds the gradients of the targets, and returns the others.
  [[nodiscard]] std::vector<NewGradient> add_gradients(const at::Tensor& loss);
  /// What handles the tensors that autograd saves in a run.
  enum class Saving : std::uint8_t {
    eager,      ///< the engine's step, if there is one
    nowhere,    ///< nothing: they stay on the device
    counted,    ///< they stay on the device, and are counted for the capture
    in_capture  ///< they are offloaded inside of the graph
  };
  [[nodiscard]] Saving saving() const;
  void run_microbatches(const Tensors& inputs, Tensors& outputs);
  /// Runs the step function on one microbatch and computes its gradients.
  void run_microbatch(const Tensors& inputs, Tensors& outputs);

  EngineResources& resources_;
  std::shared_ptr<const Given> given_;
  std::vector<std::size_t> counts_;
  std::vector<Target> targets_;
  std::optional<Sandbox> hidden_;                    ///< gradients of leaves, in a run for a graph
  std::vector<at::Tensor> leaves_;                   ///< as known_leaves returned them last
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
