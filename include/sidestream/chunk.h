#pragma once
#include <cstdint>
#include <memory>
#include <thread>

#include "sidestream/detail/export.h"

namespace sidestream {

class EngineState;

/// Names a chunk: one microbatch through one virtual stage of this rank. A step has each chunk once.
struct ChunkId {
  std::int64_t stage = 0;       ///< the virtual stage, by its number on this rank, from 0
  std::int64_t microbatch = 0;  ///< the microbatch, from 0

  /// The same chunk.
  friend bool operator==(const ChunkId& a, const ChunkId& b) noexcept {
    return a.stage == b.stage && a.microbatch == b.microbatch;
  }
};

/// The forward of one chunk, as OffloadEngine::chunk began it. While it is the active one, calls and scopes of the step belong to it.
///
/// Graphed calls of one chunk are captured as one sequence and replay from one, even if your trainer detaches layers from each other.
/// A backward needs no chunk: a call knows the chunk of its forward.
///
/// Several chunks may be open. The one that was begun or resumed last is active. If it ends, the one before it is active again.
/// Ordering: none.  Capture: illegal.
/// Threads: begins, resumes and ends on the step's thread, before the step ends.
/// Source: Megatron-LM's ChunkOffloadHandler.
class [[nodiscard]] SIDESTREAM_API Chunk {
 public:
  /// A chunk that was moved from counts as ended.
  Chunk(Chunk&& other) noexcept;
  Chunk& operator=(Chunk&&) = delete;
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;
  /// Makes the chunk the active one, for forwards that run layer by layer in turn.
  /// Throws: UsageError on another thread, and if the chunk or its step has ended.
  void resume();
  /// Ends the chunk. A second call does nothing.  Throws: UsageError on another thread (the chunk stays open), and after the step.
  void finish();
  /// Ends the chunk if `finish` has not. Never throws: on another thread a LibTorch warning is logged, and the chunk stays open.
  ~Chunk();

 private:
  friend class EngineState;
  Chunk(std::shared_ptr<EngineState> state, std::uint64_t number) noexcept;
  void check_thread(const char* what) const;
  std::shared_ptr<EngineState> state_;  ///< null: ended
  std::uint64_t number_;
  std::thread::id thread_;
};

}  // namespace sidestream
