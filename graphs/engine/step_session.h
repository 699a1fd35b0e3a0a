#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>

#include "graphs/calls/memory_shortage.h"
#include "graphs/resources/call_context.h"
#include "observe/operator_observer.h"
#include "observe/sync_finder.h"
#include "offload/saved_tensor_recorder.h"
#include "offload/sizing_peak.h"

namespace sidestream {

class EagerPlan;
struct EngineResources;
class RecordedCalls;
class EngineCounts;

/// One step of an engine: the thread-local state that it replaces on the calling thread, and what it observes there. A sizing step counts
/// the saved tensors, and offloads each group that the options name into pinned memory that it leases on demand. A planned step offloads
/// what the plan says. Threads: ends on the thread it began on.
class StepSession {
 public:
  enum class Kind : std::uint8_t { sizing, planned };

  /// Begins: sizing where `plan` is unsized, else planned. All must outlive the session.
  StepSession(EngineResources& resources, const CallContext& context, const EagerPlan& plan,
              const RecordedCalls& recorded, EngineCounts& counts);
  StepSession(const StepSession&) = delete;
  StepSession& operator=(const StepSession&) = delete;
  ~StepSession();

  /// The thread on which the step began.
  [[nodiscard]] std::thread::id thread() const noexcept { return thread_; }
  [[nodiscard]] Kind kind() const noexcept { return kind_; }
  /// The thread is as it was before the step: its engine, its recorder, its observer.
  void leave_thread() noexcept;
  void mark_not_offload(const at::Tensor& tensor) { recorder_->mark(tensor); }
  /// Ends the scopes that are still open.
  void finish_recording() { recorder_->finish(); }
  /// The current stream waits for the eager groups' copies.
  void end_copies();
  /// A backward that begins after this is no part of the sizing pass.
  void stop_sizing() noexcept;

  [[nodiscard]] const SavedTensorRecorder& recorder() const noexcept { return *recorder_; }
  /// What ran out of memory in this step.
  [[nodiscard]] const MemoryShortage& shortage() const noexcept { return shortage_; }
  /// The peaks of a sizing step. Call stop_sizing first.
  [[nodiscard]] SizingPeak& sizing_peak() { return *sizing_peak_; }

 private:
  /// In a sizing step, when backward begins and so many bytes are away: what grew on the device and no hook has seen.
  [[nodiscard]] std::int64_t unseen_bytes(std::int64_t away) const;

  EngineResources& resources_;
  const RecordedCalls& recorded_;
  std::thread::id thread_ = std::this_thread::get_id();
  MemoryShortage shortage_;
  Kind kind_;
  std::optional<SavedTensorRecorder> recorder_;
  std::unique_ptr<SizingPeak> sizing_peak_;
  bool copies_ended_ = false;
  std::int64_t allocated_at_begin_ = 0;
  std::optional<RecorderGuard> recording_;
  std::optional<SyncFinder::Step> finding_syncs_;
  std::optional<OperatorObserverGuard> journaling_;
  std::optional<CallContext::OnThread> on_thread_;
};

}  // namespace sidestream
