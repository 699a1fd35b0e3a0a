#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "graphs/calls/eager_calls.h"
#include "graphs/sequence/graph_sequence.h"
#include "offload/group_mover.h"
#include "offload/saved_tensor_recorder.h"
#include "runtime/live_memory.h"
#include "sidestream/report.h"

namespace sidestream {

class CallTable;
class EagerPlan;
class EngineSequences;
struct EngineResources;

/// Counts what an engine does, and makes its report when it is asked for. Threads: the step's, except `unseen`.
class ReportBuilder {
 public:
  /// Whole steps so far.
  [[nodiscard]] std::int64_t steps() const noexcept { return counted_.steps; }
  /// Graphs so far.
  [[nodiscard]] std::int64_t captures() const noexcept { return counted_.captures; }

  /// A call that was to be graphed ran eagerly.
  void eager_call() noexcept { ++counted_.eager_calls; }
  /// The same of a bucketed call of this name, with the cause for the notes.
  void bucketed_call_ran(const std::string& name, EagerCause cause);
  /// A bucket was dropped to make room for another. `name`: of the first callable of its set.
  void bucket_dropped(const std::string& name, std::int64_t max_buckets);
  void captured(const GraphSequence& sequence);
  /// So many of the captured calls took the place of others, or stand beside them.
  void recaptured(std::int64_t calls) noexcept { counted_.recaptures += calls; }
  /// In the sizing pass, when its backward begins. Threads: autograd's.
  void unseen(std::int64_t bytes) noexcept { counted_.unseen_bytes = bytes; }

  /// What sequences did in the step that now ends, whole or not.
  void replayed(const GraphSequence::Counts& counts);
  /// A whole sizing step, behind its `step_ended`; `unoffloaded_peak`: see UnoffloadedPeak.
  void sizing_ended(const SavedTensorRecorder& recorder, std::int64_t unoffloaded_peak);
  /// A whole step.
  /// Of the latest step.
  void copied(const CopyCounts& copies) noexcept;
  void step_ended(const SavedTensorRecorder& recorder, const CopyCounts& copies, const LiveMemory::Peak& peak);
  void count_step() noexcept { ++counted_.steps; }

  [[nodiscard]] Report build(const EngineResources& resources, const EngineSequences& sequences, const EagerPlan& plan,
                             const CallTable& calls) const;

 private:
  /// Why bucketed calls ran eagerly, and bounds on buckets that are too small.
  void append_buckets(std::vector<std::string>& notes) const;

  struct Buckets {
    EagerRuns runs;
    std::int64_t dropped = 0;
    std::int64_t bound = 0;
  };

  Report counted_;                          ///< what the latest whole step and all steps so far add up to
  std::map<std::string, Buckets> buckets_;  ///< by the name of a callable
};

}  // namespace sidestream
