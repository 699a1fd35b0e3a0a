#pragma once
#include <list>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "graphs/outputs/output_storage.h"
#include "memory/shared_slots.h"
#include "runtime/runtime.h"
#include "sidestream/graph_pool.h"

namespace sidestream {

class GraphSequence;

/// Device memory that graphs use as they replay: one sequence's own, or shared by sequences that use it by turns.
///
/// Note [Turns in shared memory]
/// What a sequence saved for its backward, what its copies read and write, and the outputs that it gave lie where other sequences of the
/// same memory compute. So one sequence at a time has the turn: the one that was launched last. It keeps the turn while a backward of
/// its calls is pending; another sequence's forward is refused then. Where none is, the other sequence takes the turn over before its
/// launch, with M the stream that the call is made on:
///
///   M: wait for the stream that the former sequence was called on, which is behind its graphs, where that is not M
///   M: wait for the former sequence's copies
///   M: copy out what is held of its outputs, see Note [Outputs are ordinary tensors]
///
/// A sequence that goes away does the same. Where the device has no room for a copy then, what is held stays where it is, and the next
/// sequence that wants the turn copies it out, or is refused by the allocator before anything has changed.
///
/// A backward that comes later to one of its forwards (a retained one) is refused, for its saved tensors are gone.
/// The same turns order the pinned slots that the sequences share (SharedSlots): the former sequence's copies are done where M goes on, and
/// the new one's begin behind its graphs.
/// Threads: all of one memory's sequences share `mutex`.
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
  /// The pool of a sequence that is to be captured: one for all, where it is shared. It may outlive the sequence and its engine.
  [[nodiscard]] std::shared_ptr<MemoryPool> pool(const std::shared_ptr<Runtime>& runtime);
  /// The stream of all captures in shared memory: blocks of a pool are keyed by stream. Behind `pool`.
  [[nodiscard]] const OwnedStream* capture_stream() const noexcept;
  /// Of shared memory: the slots of `arena` that its sequences' copies leave to. Lives as long as this object.
  [[nodiscard]] SharedSlots& slots(const std::shared_ptr<HostArena>& arena);

  /// The sequence that has the turn; null where none has. Under `mutex`.
  [[nodiscard]] GraphSequence* turn() const noexcept { return turn_; }
  void set_turn(GraphSequence* sequence) noexcept { turn_ = sequence; }
  /// True while the sequence that has the turn awaits a backward.
  [[nodiscard]] bool pending();
  /// `sequence` is gone, or was reset.
  void leave(const GraphSequence* sequence) noexcept { turn_ = turn_ == sequence ? nullptr : turn_; }
  /// What is held of a sequence that leaves, and found no room elsewhere.
  void leave_behind(OutputStorage storage) { left_behind_.push_back(std::move(storage)); }
  /// Before another sequence has the memory. Throws: as OutputStorage::before_overwrite; may be called again.
  void part_with_left_behind(Runtime& runtime, const Event& mark, OutputCounts& counts);

 private:
  struct Kept;
  Use use_;
  std::recursive_mutex mutex_;
  std::shared_ptr<Kept> kept_;    ///< of shared memory
  std::list<SharedSlots> slots_;  ///< of each engine's arena
  GraphSequence* turn_ = nullptr;
  std::vector<OutputStorage> left_behind_;
};

}  // namespace sidestream
