#pragma once
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "graphs/outputs/output_storage.h"
#include "memory/shared_slots.h"
#include "runtime/runtime.h"
#include "sidestream/graph_pool.h"

namespace sidestream {

class GraphSequence;

/// Device memory that graphs use as they replay: of one sequence, or shared by sequences that take turns with it.
///
/// Note [Turns in shared memory]
/// M is the stream on which a call of the new sequence is made, F the stream on which the former sequence was called.
///
///   F    graphs of the former sequence --+
///                                        v
///   M    (wait for F) --- (wait for the former's copies) --- (copy out held outputs) --- graphs of the new sequence
///                                        ^
///   D, H    copies of the former --------+
///
/// One sequence at a time has the turn: the one that was launched last. Other sequences of the same memory compute where it has its
/// saved tensors, the targets of its copies, and its outputs.
///
/// While a backward of its calls is pending, a sequence keeps the turn, and a forward of another sequence is refused: that forward would
/// overwrite what the backward reads. If no backward is pending, the other sequence takes the turn over before its launch.
///
/// Before M launches, it waits for F if that is another stream, because F is after the former sequence's graphs. M also waits for the
/// former sequence's copies, and copies out the former sequence's outputs that are still held: see Note [Outputs are ordinary tensors].
///
/// A sequence that ends does the same. If the device has no room for a copy then, held outputs stay where they are. The next sequence
/// that wants the turn copies them out, or the allocator refuses it before anything has changed.
///
/// If a backward of an earlier forward comes later (a retained graph), it is refused, because its saved tensors are gone.
///
/// The same turns order the pinned slots that the sequences share (SharedSlots): the former sequence's copies are done when M goes on,
/// and the new sequence's copies begin after its graphs.
///
/// Threads: all sequences of one memory share `mutex`.
class GraphMemory {
 public:
  enum class Use : std::uint8_t { own, shared };
  explicit GraphMemory(Use use) noexcept : use_(use) {}
  GraphMemory(const GraphMemory&) = delete;
  GraphMemory& operator=(const GraphMemory&) = delete;
  ~GraphMemory() = default;

  /// Throws: UsageError for a pool of another device than `device`.
  [[nodiscard]] static std::shared_ptr<GraphMemory> of(const GraphPool& pool, c10::Device device);

  [[nodiscard]] bool shared() const noexcept { return use_ == Use::shared; }
  [[nodiscard]] std::recursive_mutex& mutex() noexcept { return mutex_; }
  /// Signalled when a sequence of this memory awaits no backward any more. Waited for with `mutex`.
  [[nodiscard]] std::condition_variable_any& settled() noexcept { return settled_; }
  /// The pool of a sequence that will be captured: one for all if the memory is shared. It may outlive the sequence and its engine.
  [[nodiscard]] std::shared_ptr<MemoryPool> pool(const std::shared_ptr<Runtime>& runtime);
  /// The stream of all captures in shared memory: blocks of a pool are keyed by stream. Call `pool` first.
  [[nodiscard]] const OwnedStream* capture_stream() const noexcept;
  /// Of shared memory: the slots of `arena` that its sequences are offloaded to. Lives as long as this object.
  [[nodiscard]] SharedSlots& slots(const std::shared_ptr<HostArena>& arena);

  /// The sequence that has the turn; null if none has. Under `mutex`.
  [[nodiscard]] GraphSequence* turn() const noexcept { return turn_; }
  /// True while a sequence other than `sequence` has the turn and awaits a backward: no graph of `sequence` may be launched. Locks `mutex`.
  [[nodiscard]] bool pending_beside(const GraphSequence* sequence);
  /// Before a capture in this memory. `replaced`: the sequence that it replaces, or null. Locks `mutex`.
  /// Throws: UsageError if another sequence awaits a backward.
  void check_capture(const GraphSequence* replaced);
  /// Throws: UsageError that names the call whose backward is pending; `what`: the call that would be replayed.
  [[noreturn]] void refuse(const std::string& what) const;
  /// Before the first launch of `sequence` in its turn. Null: before a capture. The current stream waits for all uses of the memory, and
  /// outputs that are still held are copied out. No backward is pending. Under `mutex`.
  /// Throws: as OutputStorage::before_overwrite; the former sequence keeps the turn, and the call may be repeated.
  void give_turn_to(GraphSequence* sequence, Runtime& runtime, const Event& mark, OutputStorage::Counts& counts);
  /// `sequence` has ended, or was reset.
  void ended(const GraphSequence* sequence) noexcept { turn_ = turn_ == sequence ? nullptr : turn_; }
  /// A held output of a sequence that has ended, for which there was no room elsewhere.
  void keep_held(OutputStorage storage) { still_held_.push_back(std::move(storage)); }

 private:
  struct Kept;
  Use use_;
  std::recursive_mutex mutex_;
  std::condition_variable_any settled_;
  std::shared_ptr<Kept> kept_;    ///< of shared memory
  std::list<SharedSlots> slots_;  ///< of each engine's arena
  GraphSequence* turn_ = nullptr;
  std::vector<OutputStorage> still_held_;
};

}  // namespace sidestream
