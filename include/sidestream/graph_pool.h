#pragma once
#include <cstdint>
#include <memory>

#include <c10/core/Device.h>

#include "sidestream/detail/export.h"

namespace sidestream {

class GraphMemory;

/// Device memory that several captures share [pool]: given by GraphOptions::pool to several calls of make_graphed_callables, of
/// one engine or of several. What one of them saved for its backward lies where the others compute, so they replay by turns: while a
/// backward of one is pending, a replay of another is a UsageError (`ss::call` runs eagerly then, or as CallOptions::on_pending says).
/// Outputs that are held are copied out before another one's replay overwrites them. The largest is best captured first: the
/// others fit into its memory, which goes back to the device when the pool and all graphs in it are gone.
/// Threads: any.
class SIDESTREAM_API GraphPool {
 public:
  /// Takes no memory yet.
  explicit GraphPool(c10::Device device);
  GraphPool(const GraphPool&) = delete;
  GraphPool& operator=(const GraphPool&) = delete;
  ~GraphPool();
  [[nodiscard]] c10::Device device() const noexcept { return device_; }

 private:
  friend class GraphMemory;
  c10::Device device_;
  std::shared_ptr<GraphMemory> memory_;
};

}  // namespace sidestream
