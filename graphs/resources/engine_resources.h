#pragma once
#include <memory>
#include <optional>
#include <vector>

#include "graphs/resources/step_check.h"
#include "graphs/resources/step_memory.h"
#include "graphs/resources/step_syncs.h"
#include "graphs/sequence/delayed_weights.h"
#include "graphs/sequence/graph_resources.h"
#include "memory/host_arena.h"
#include "offload/capture_offload.h"
#include "offload/eager_offload.h"
#include "offload/exclusions.h"
#include "offload/group_mover.h"
#include "offload/name_pattern.h"
#include "offload/recorder_books.h"
#include "offload/scope_tree.h"
#include "runtime/runtime.h"
#include "sidestream/detail/module_forward.h"
#include "sidestream/options.h"

namespace sidestream {

/// `options` as an engine uses them: what the environment sets is filled in.
/// Throws: UsageError for values that make no sense.
[[nodiscard]] Options checked_options(Options options);

/// `current`: the caller's stream, if a capture begins. Throws: UsageError for values that make no sense (see GraphOptions).
void check_graph_options(const GraphOptions& options, std::optional<c10::Stream> current = std::nullopt);

/// Whether all ranks capture now: the answer of GraphOptions::agree_to_capture, true if it is not set. `mine`: this rank has something to
/// capture. Throws: what agree_to_capture throws.
[[nodiscard]] inline bool agree_to_capture(const GraphOptions& options, bool mine = true) {
  return options.agree_to_capture() == nullptr || options.agree_to_capture()(mine);
}

class WholeStepOffload;

/// The device, the memory, the movers and the names of one engine: what its parts share.
struct EngineResources {
  /// `runtime`: null makes that of the options' device. Throws: UsageError, DeviceError (see OffloadEngine).
  EngineResources(torch::nn::Module& model, Options given, std::shared_ptr<Runtime> given_runtime);
  EngineResources(const EngineResources&) = delete;
  EngineResources& operator=(const EngineResources&) = delete;
  ~EngineResources() { delayed_weights->close(); }

  [[nodiscard]] GraphResources for_graphs() {
    return {runtime,
            arena,
            &tree,
            &exclusions,
            &capture_stream,
            mover,
            capture_offload,
            eager,
            options.progress(),
            &owned_gradients,
            &model,
            link(),
            GraphResources::CopyRoom::as_planned,
            nullptr,
            delayed_weights,
            {},
            room_in_budget};
  }
  /// Looks up the parameters and buffers of the model, which are not offloaded.
  void learn_registered();
  /// Measured once, if anything depends on it; not set if the device keeps no time of its own, or has no memory to measure.
  [[nodiscard]] std::optional<LinkPace> link();

  const torch::nn::Module& model;
  Options options;
  NamePatterns graphed;  ///< names of calls that are captured into graphs
  StepCheck check;
  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<HostArena> arena;
  std::vector<std::weak_ptr<const WholeStepOffload>> whole_step_offloads;  ///< of whole steps' graphs, for the report
  ScopeTree tree;
  Exclusions exclusions;
  OwnedStream capture_stream;
  std::shared_ptr<GroupMover> mover;
  std::shared_ptr<CaptureOffload> capture_offload;
  std::shared_ptr<EagerOffload> eager;
  std::shared_ptr<RecorderBooks> books = std::make_shared<RecorderBooks>();  ///< of the steps' recorders
  OwnedGradients owned_gradients;
  std::shared_ptr<DelayedWeights> delayed_weights = std::make_shared<DelayedWeights>();
  std::shared_ptr<EagerMemoryEstimate> rest;
  std::optional<std::uint64_t> room_in_budget = {};  ///< see GraphResources
  std::unique_ptr<StepSyncs> syncs;                  ///< null unless the options ask for it

 private:
  bool link_measured_ = false;
  std::optional<LinkPace> link_;
};

}  // namespace sidestream
