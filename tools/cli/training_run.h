#pragma once
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "sidestream/journal.h"
#include "sidestream/pipeline_order.h"
#include "sidestream/progress.h"
#include "tools/cli/gradient_comparison.h"
#include "tools/cli/text_corpus.h"
#include "tools/cli/training_options.h"
#include "tools/cli/training_result.h"

namespace sidestream::cli {

/// How a run goes through the model's layers.
struct TrainingMode {
  bool graphs = false;
  bool offload = false;

  /// "eager", "graphs", "offload" or "graphs+offload".
  [[nodiscard]] std::string name() const;
  [[nodiscard]] bool plain() const noexcept { return !graphs && !offload; }
};

/// A result that says what is to be trained, on which text and device and in which mode; nothing of it was measured yet.
[[nodiscard]] TrainingResult described(const TrainingOptions& options, const TextCorpus& corpus,
                                       const std::string& device_name);

/// A rank's place in a pipeline.
struct PipelineRank {
  /// Runs a virtual stage of this rank on a microbatch.
  using Stage = std::function<at::Tensor(std::int64_t stage, std::int64_t microbatch, const at::Tensor& input)>;

  /// Computes the delayed weight gradients of a chunk.
  using WeightGradients = std::function<void(std::int64_t stage, std::int64_t microbatch)>;

  std::vector<std::int64_t> parts;  ///< of the model, by virtual stage
  std::vector<PipelineStep> order;  ///< of its chunks
  /// Runs a step's chunks; gives the loss where the last part is.
  std::function<at::Tensor(const Stage&, const WeightGradients&)> run;
};

/// A model in training: weights, optimizer, its place in the text, and the engine if its mode has one. Runs with equal options
/// see equal weights and equal windows.
class TrainingRun {
 public:
  /// `corpus` must outlive the run. `progress`, if any, hears of warm-up, pinning and captures. With `rank`, the run trains the parts of
  /// that rank only.
  /// Throws: what the engine throws for options it refuses.
  TrainingRun(const TrainingOptions& options, c10::Device device, TrainingMode mode, const TextCorpus& corpus,
              ProgressCallback progress = {}, std::optional<PipelineRank> rank = {});
  TrainingRun(const TrainingRun&) = delete;
  TrainingRun& operator=(const TrainingRun&) = delete;
  ~TrainingRun();

  /// One step; `with_gradients`, if any, runs between backward and the optimizer; where both are one graph, behind it, with the
  /// gradients still in place. Returns the training loss in nats a byte.
  double step(const std::function<void()>& with_gradients = {});
  /// Mean loss over the windows of the held-out text, at most `kHeldOutBatches` batches of it.
  [[nodiscard]] double held_out_loss();
  /// Makes the weights those of `other`, in place.
  void take_parameters(const TrainingRun& other);

  /// Those that are trained here.
  [[nodiscard]] NamedTensors parameters() const;
  [[nodiscard]] std::int64_t parameter_count() const;
  /// What the engine counted; zeros without one.
  [[nodiscard]] OffloadNumbers offload_numbers() const;
  /// A copy of every gradient, on the device. For `step`'s callback.
  [[nodiscard]] NamedTensors gradients() const;
  /// What the order check of the first steps found; zeros without one.
  [[nodiscard]] OrderNumbers order_numbers() const;
  /// How many replays were compared with eager runs.
  [[nodiscard]] VerifiedNumbers verified_numbers() const;
  /// What made the host wait; none where the options do not ask for it.
  [[nodiscard]] std::optional<SyncNumbers> sync_numbers() const;
  /// Of the checked steps.
  [[nodiscard]] Journal journal() const;
  /// Of one step, in the Trace Event Format; empty if none was traced.
  [[nodiscard]] std::string trace() const;
  /// Draws the captured graphs into `folder`, which is made where it is missing; how many files. Throws: UsageError.
  std::size_t write_graphs(const std::filesystem::path& folder) const;

  static constexpr std::size_t kHeldOutBatches = 32;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sidestream::cli
