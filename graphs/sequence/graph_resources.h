#pragma once
#include <cstdint>
#include <memory>
#include <optional>

#include "analysis/copy_pace.h"
#include "analysis/planner.h"
#include "graphs/gradients/call_gradients.h"
#include "graphs/sequence/graph_memory.h"
#include "memory/host_arena.h"
#include "offload/capture_offload.h"
#include "offload/eager_offload.h"
#include "offload/exclusions.h"
#include "offload/scope_tree.h"
#include "runtime/runtime.h"
#include "sidestream/detail/module_forward.h"
#include "sidestream/progress.h"

namespace sidestream {

class DelayedWeights;

/// The parts of one engine that its captures and replays share.
struct GraphResources {
  /// How much of the offloaded storages may be on the device, besides the saved tensors of the running call.
  enum class CopyRoom : std::uint8_t {
    as_planned,
    least,       ///< no more than the largest call's
    none_stays,  ///< the same; storages that backward needs immediately are offloaded too
  };

  /// The plan of an attempt to capture a sequence, so far.
  struct Attempt {
    Profile profile;
    Plan plan;
  };

  std::shared_ptr<Runtime> runtime;
  std::shared_ptr<HostArena> arena;
  ScopeTree* tree = nullptr;
  Exclusions* exclusions = nullptr;
  const OwnedStream* capture_stream = nullptr;  ///< one for all captures: pool blocks are keyed by stream
  std::shared_ptr<GroupMover> mover;
  std::shared_ptr<CaptureOffload> offload;
  std::shared_ptr<EagerOffload> eager;
  ProgressCallback progress;  ///< empty if no code listens
  OwnedGradients* owned_gradients = nullptr;
  const torch::nn::Module* model = nullptr;  ///< gives parameters their names; may be null
  std::optional<LinkPace> link;              ///< if it is known
  CopyRoom room = CopyRoom::as_planned;
  Attempt* attempt = nullptr;                            ///< filled for the error if the capture fails
  std::shared_ptr<DelayedWeights> delayed_weights = {};  ///< of the engine's calls
  /// Shared by sequences of the engine. Null if the options' pool is used, or memory of the sequence's own.
  std::shared_ptr<GraphMemory> memory = {};
  /// With Options::device_budget: how many bytes of saved tensors may be on the device, 0 as long as that is not known. Then all is
  /// offloaded, also what backward needs immediately.
  std::optional<std::uint64_t> room_in_budget = {};
};

}  // namespace sidestream
