#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "graphs/sequence/graph_sequence.h"
#include "sidestream/graph_options.h"

namespace sidestream {

class EngineSequences;
struct EngineResources;
class SavedTensorRecorder;

/// Notices that the device ran out of memory while it lived, whoever asked for it and whatever became of the error.
class MemoryShortage {
 public:
  /// `resources` must outlive this object.
  explicit MemoryShortage(const EngineResources& resources);
  [[nodiscard]] bool met() const;
  /// Where it was met: says by LibTorch's warnings what held the memory in the step of `recorder` and what else may leave. The
  /// error, which is on its way through the user's code, knows neither.
  void warn(const EngineSequences& sequences, const SavedTensorRecorder& recorder) const noexcept;

 protected:
  [[nodiscard]] const EngineResources& resources() const noexcept { return resources_; }
  /// When it began.
  [[nodiscard]] std::int64_t allocated() const noexcept { return allocated_; }

 private:
  const EngineResources& resources_;
  std::int64_t refusals_;
  std::int64_t allocated_;
};

/// The same around one attempt to capture a sequence.
class CaptureShortage : public MemoryShortage {
 public:
  /// Where the allocator holds no cached memory.
  explicit CaptureShortage(const EngineResources& resources);
  /// Inside of a handler: the error says that the device is full.
  [[nodiscard]] bool is_the_error() const;
  /// Inside of a handler: throws such an error as a DeviceError that says by how much the calls of `attempt`, `first` and those
  /// behind it, do not fit, what is held, and what else may leave; any other as it is.
  [[noreturn]] void rethrow(const EngineSequences& sequences, const CaptureAttempt& attempt,
                            const std::string& first) const;

 private:
  /// How much is missing, as far as it is known: what was asked for behind what was refused is not. Empty where nothing is.
  [[nodiscard]] std::string lack(const std::string& first) const;

  std::int64_t reserved_;
};

/// Captures a sequence that fits the device. Where memory runs out, or less is left than the rest of a step took (EagerMemoryEstimate), and the
/// options offload anything, it is planned and captured again with less of what leaves on the device, twice at most; nothing of it has
/// replayed by then. `memory`: see GraphResources. `sequences`: those before it; it marks their outputs again where a capture failed.
/// Throws: as make_graphed_callables; DeviceError that says by how much it does not fit. What is left for the rest may be less than
/// that took all the same: it is an estimate, and a note says so.
[[nodiscard]] std::shared_ptr<GraphSequence> capture_that_fits(EngineResources& resources, EngineSequences& sequences,
                                                               const std::vector<CallSpec>& specs,
                                                               const GraphOptions& options,
                                                               const std::shared_ptr<GraphMemory>& memory);

}  // namespace sidestream
