#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "runtime/live_memory.h"
#include "runtime/runtime.h"

namespace sidestream {

/// What a sequence's graphs use of their pool as they replay, beyond what the allocator counts; see Note [Live memory]. Replays use
/// what the captures used: in the order of the captures, the pool's live bytes in each are known.
/// Capture: illegal.  Threads: one at a time (the sequence's mutex).
class PoolUse {
 public:
  class Measurement;
  /// One graph's. Bytes of the whole pool.
  struct GraphUse {
    std::int64_t peak = 0;             ///< live while it ran, at most
    std::int64_t after = 0;            ///< live from then until the next graph begins
    std::int64_t in_flight = 0;        ///< of offloaded bytes, on the device while it runs
    std::int64_t in_flight_after = 0;  ///< and from its launch until the next one
  };

  /// `graphs`: what the captures used, by graph index. `ungiven`: bytes that the graphs hold for a gradient to come. `pool` and `graphs`
  /// must outlive this object.
  PoolUse(std::shared_ptr<Runtime> runtime, const MemoryPool& pool, const std::vector<GraphUse>& graphs,
          std::int64_t ungiven);
  PoolUse(const PoolUse&) = delete;
  PoolUse& operator=(const PoolUse&) = delete;
  ~PoolUse();

  /// After the launch of the graph at `graph_index`. Throws: as LiveMemory.
  void launched(std::size_t graph_index);
  /// No backward is pending. Tensors hold what the pool still holds, except `ungiven`: bytes of gradients that no caller received.
  void idle(std::int64_t ungiven = 0) noexcept;
  /// Graphs were dropped, and with them what they held.
  void dropped() noexcept;

 private:
  std::shared_ptr<Runtime> runtime_;
  const MemoryPool& pool_;
  LiveMemory& memory_;
  const std::vector<GraphUse>& graphs_;
  std::int64_t allocated_ = -1;  ///< of the pool, for as long as the graphs live; negative: not known yet
  std::int64_t hidden_ = 0;
  std::int64_t in_flight_ = 0;
};
/// Measures what a sequence's captures use of their pool: what their replays will. What other threads allocate on the device while a
/// capture runs counts as its own.
class PoolUse::Measurement {
 public:
  /// Both must outlive this object.
  Measurement(Runtime& runtime, const MemoryPool& pool) : runtime_(runtime), pool_(pool) {}

  /// Before anything is released for the capture at `graph_index`: what is live here was so since the one before.
  void comes_to(std::size_t graph_index);
  void capture_begins();
  void capture_ended();
  /// After the last of `graphs` captures: by graph index. Copies are not counted yet.
  [[nodiscard]] std::vector<GraphUse> finish(std::size_t graphs);

 private:
  Runtime& runtime_;
  const MemoryPool& pool_;
  std::vector<GraphUse> graphs_;
  std::optional<LiveMemory::Measurement> measurement_;
  std::int64_t pool_before_ = 0;
  std::int64_t device_before_ = 0;
};

}  // namespace sidestream
