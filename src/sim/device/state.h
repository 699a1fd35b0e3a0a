#pragma once
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "sim/device/allocator.h"
#include "sim/device/capture.h"
#include "sim/device/device.h"
#include "sim/device/pinned.h"
#include "sim/device/timeline.h"

namespace sidestream::sim {

struct StreamState {
  WorkId last = no_work;
  c10::SmallVector<WorkId, 4> waits;  ///< what the next work is ordered after, besides `last`
  Capture* capture = nullptr;
  NodeSet capture_last;        ///< nodes of `capture` that the next node is ordered after
  WorkId host_seen = no_work;  ///< the latest look of the host that its work is ordered after
};

/// The queue of what the host has seen.
inline constexpr c10::StreamId host_queue = -1;

/// A freed block that other streams still use.
struct UsedBlock {
  Block* block = nullptr;
  c10::SmallVector<WorkId, 2> until;  ///< what those streams had queued when it was freed
  bool in_capture = false;            ///< some of them captured then: not before the captures end
};

/// Everything that the sim device owns, under one lock.
struct Device::State {
  explicit State(std::size_t capacity) : memory(capacity) { streams.emplace_back(); }

  /// Throws: UsageError for a number that no stream has.
  [[nodiscard]] StreamState& stream(c10::StreamId id);
  [[nodiscard]] Capture* capture_of_thread(std::thread::id thread) const noexcept;
  /// Throws CaptureError, and invalidates the capture, when the calling thread captures.
  void refuse_in_capture(const char* what);
  /// Throws CaptureError when the stream's capture was invalidated, or when the calling thread captures and this is the
  /// default stream.
  void check_issue(c10::StreamId id, StreamState& stream, const char* what);
  /// Throws: as Device::draw.
  void check_draw(c10::StreamId id, const at::Generator& generator);
  [[noreturn]] void invalidate(Capture& capture, const std::string& reason);
  /// The host has seen all of `done`: in a recording, whatever is issued from now on, on any stream, is ordered after it.
  void host_saw(const std::vector<WorkId>& done);
  void host_saw(const StreamState& stream);
  /// Moves what the stream's next work is ordered after to `after`.
  void order_after(StreamState& stream, c10::SmallVector<WorkId, 2>& after);
  /// Queues work after the stream's earlier work and after the events for which it waits.
  WorkId enqueue(StreamState& stream, Queued queued);
  /// All that later work on the stream is ordered after has run.
  [[nodiscard]] bool done(const StreamState& stream) const;
  /// Runs it.
  void force(StreamState& stream);
  /// Ends the capture and undoes what it computed. Later captures of its pool will compute on that.
  void close(Capture& capture) noexcept;
  /// Keeps a block that other streams use from being lent again.
  void hold_back(Block& block);
  /// Frees the blocks of `used_blocks` whose users are done.
  void free_unused() noexcept;

  mutable std::recursive_mutex mutex;
  CachingAllocator memory;
  PinnedRegistry pinned;
  Timeline timeline;
  std::deque<StreamState> streams;
  std::vector<UsedBlock> used_blocks;
  std::vector<std::unique_ptr<Capture>> captures;
  std::uint64_t captures_begun = 0;
  bool strict = false;
  /// Called under the lock for each copy between host and device, also in a launched graph, before it runs. Set while a recording is made.
  std::function<void(const Work&)> copy_issued;
  int recordings = 0;  ///< alive: their works may run again
  std::uint64_t unrecorded_waits = 0;
  WorkId host_look = no_work;              ///< the latest, in a recording
  std::unordered_set<std::string> places;  ///< what `place` has handed out

  // Read without the lock, so that an operator outside of captures and recordings pays one load.
  std::atomic<int> open_captures{0};
  std::atomic<bool> keeping{false};
};

}  // namespace sidestream::sim
