#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "graphs/calls/call_site.h"
#include "graphs/sequence/graph_resources.h"
#include "graphs/sequence/graph_sequence.h"
#include "sidestream/graph_options.h"

namespace sidestream {

struct EngineResources;
class SavedTensorRecorder;

/// Notices that the device ran out of memory during its lifetime, whatever code asked for memory and whatever became of the error. The
/// lifetime is a step, or one attempt to capture a sequence, which begins when the allocator holds no cached memory.
class MemoryShortage {
 public:
  /// `resources` must outlive this object.
  explicit MemoryShortage(const EngineResources& resources);
  /// If it did in a step: a LibTorch warning says what held the memory in the step of `recorder`, and what else may be offloaded. The
  /// error itself, which passes through the user's code, knows neither.
  void warn(const SequenceHolders& sequences, const SavedTensorRecorder& recorder) const noexcept;
  /// Inside of a handler: the error says that the device is full.
  [[nodiscard]] bool is_the_error() const;
  /// Inside of the handler of a failed capture: throws such an error as a DeviceError, any other error unchanged. The DeviceError says
  /// by how much the calls of `attempt` (`first` and the calls after it) do not fit, which memory is held, and what else may be offloaded.
  [[noreturn]] void rethrow(const SequenceHolders& sequences, const GraphResources::Attempt& attempt,
                            const std::string& first) const;

 private:
  [[nodiscard]] bool met() const;
  /// How much is missing, as far as it is known: later requests are not. Empty if it is not known.
  [[nodiscard]] std::string lack(const std::string& first) const;

  const EngineResources& resources_;
  // When it began.
  std::int64_t refusals_;
  std::int64_t allocated_;
  std::int64_t reserved_;
};

/// Captures a sequence that fits the device. If memory runs out, or if less is left than the rest of a step took (EagerMemoryEstimate),
/// the sequence is captured again, at most twice, with fewer offloaded bytes on the device at a time. This needs options that offload
/// something. No graph of the sequence has replayed by then. The rest of a step is an estimate: if less is left in the end, a note says
/// so.
/// `memory`: see GraphResources. `others`: the engine's other sequences. A capture ends with none of their outputs marked; `mark_outputs`,
/// which marks them again, is called after each capture that gave no sequence.
/// Throws: as make_graphed_callables; DeviceError that says by how much the sequence does not fit.
[[nodiscard]] std::shared_ptr<GraphSequence> capture_that_fits(EngineResources& resources,
                                                               const SequenceHolders& others,
                                                               const std::function<void()>& mark_outputs,
                                                               const std::vector<CallSpec>& specs,
                                                               const SequenceOrder& order, const GraphOptions& options,
                                                               const std::shared_ptr<GraphMemory>& memory);

}  // namespace sidestream
