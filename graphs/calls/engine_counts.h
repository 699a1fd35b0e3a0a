#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "graphs/sequence/graph_sequence.h"
#include "offload/group_mover.h"
#include "offload/saved_tensor_recorder.h"
#include "runtime/live_memory.h"
#include "sidestream/report.h"

namespace sidestream {

/// Why a call that matches `graph` ran eagerly, and not to be recorded.
enum class EagerCause : std::uint8_t {
  no_grad,
  eval_mode,
  in_backward,       ///< a checkpoint that runs its forward again
  new_arguments,     ///< OnNewArguments::eager
  over_bound,        ///< CallOptions::max_captures
  unequal,           ///< an argument differs from its own copy
  shared_memory,     ///< another capture in the memory of the one that fits awaits a backward
  no_bucket,         ///< a bucketed call whose inputs fit no bucket
  not_agreed,        ///< GraphOptions::agree_to_capture
  other_mode,        ///< training flags or module options of a callable are not those of its capture
  after_eager_call,  ///< a callable that is linked to one that ran eagerly
  with_gradients,    ///< a callable with GraphOptions::forward_only
};

/// For the report.
[[nodiscard]] const char* text_of(EagerCause cause);
/// Why the calling thread's calls are not captured or replayed now; `otherwise` if the thread is in no such mode.
[[nodiscard]] EagerCause cause_on_this_thread(EagerCause otherwise);

/// One call's eager runs by cause.
class EagerRuns {
 public:
  static constexpr std::size_t kCauses = static_cast<std::size_t>(EagerCause::with_gradients) + 1;  // the last

  void count(EagerCause cause) noexcept { ++runs_[static_cast<std::size_t>(cause)]; }
  [[nodiscard]] std::int64_t of(EagerCause cause) const noexcept { return runs_[static_cast<std::size_t>(cause)]; }

 private:
  std::array<std::int64_t, kCauses> runs_{};
};

/// Counts what an engine does, for its report. Threads: the step's, except for `report.unseen_bytes`, which autograd's
/// thread writes.
class EngineCounts {
 public:
  /// Counts of bucketed callables of one name. They stay when the callables are gone.
  struct Buckets {
    EagerRuns runs;
    std::int64_t dropped = 0;  ///< buckets, to make room for others; of the first callable of a set
    std::int64_t bound = 0;    ///< BucketOptions::max_buckets
  };

  void captured(const GraphSequence& sequence);
  /// What sequences did in the step that now ends, whole or not.
  void replayed(const GraphSequence::Counts& counts);
  /// A whole sizing step, after its `step_ended`; `peak_without_offload`: see SizingPeak.
  void sizing_ended(const SavedTensorRecorder& recorder, std::int64_t peak_without_offload);
  /// Of the latest step.
  void copied(const CopyCounts& copies) noexcept;
  /// A whole step.
  void step_ended(const SavedTensorRecorder& recorder, const CopyCounts& copies, const LiveMemory::Peak& peak);

  /// What the latest whole step and all steps so far add up to. What is not counted here is empty.
  Report report;
  /// In the latest sizing step: the bytes of tensors that stay because their storages are small.
  std::int64_t small_bytes = 0;
  std::map<std::string, Buckets> buckets;  ///< by name
};

}  // namespace sidestream
