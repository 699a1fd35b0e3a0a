#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "analysis/sequence_order.h"
#include "graphs/sequence/captured_call.h"
#include "graphs/sequence/pool_use.h"
#include "runtime/live_memory.h"
#include "runtime/runtime.h"

namespace sidestream {

/// Measures what a sequence's captures use of their pool: what their replays will. What other threads allocate on the device while a
/// capture runs counts as its own.
class CapturedUse {
 public:
  /// Both must outlive this object.
  CapturedUse(Runtime& runtime, const MemoryPool& pool) : runtime_(runtime), pool_(pool) {}

  /// Before anything is let go of for the capture at `graph_index`: what is live here was so since the one before.
  void comes_to(std::size_t graph_index);
  void capture_begins();
  void capture_ended();
  /// `calls` with the graph indices of their copies.
  [[nodiscard]] std::vector<PoolUse::GraphUse> finish(const CapturedCalls& calls, const SequenceOrder& order);

 private:
  Runtime& runtime_;
  const MemoryPool& pool_;
  std::vector<PoolUse::GraphUse> graphs_;
  std::optional<LiveMemory::Measurement> measurement_;
  std::int64_t pool_before_ = 0;
  std::int64_t device_before_ = 0;
};

}  // namespace sidestream
