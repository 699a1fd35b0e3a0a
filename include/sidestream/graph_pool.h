#pragma once
#include <memory>

#include <c10/core/Device.h>

#include "sidestream/detail/export.h"

namespace sidestream {

class GraphMemory;

/// Device memory that several captures share [pool]. GraphOptions::pool gives it to several calls of make_graphed_callables, of one engine
/// or of several.
///
/// The captures replay in turns: the tensors that one of them saves for its backward lie in memory where the others compute. While a
/// backward of one is pending, a replay of another is a UsageError (`ss::call` runs eagerly then, or as CallOptions::on_pending says). If
/// an output is still referenced, it is copied out before a replay of another capture overwrites it.
/// Capture the largest first, so that the others fit into its memory. The memory is freed when the pool and all its graphs are gone.
/// Threads: any.
class SIDESTREAM_API GraphPool {
 public:
  /// A pool on `device`. It takes no memory yet.
  explicit GraphPool(c10::Device device);
  GraphPool(const GraphPool&) = delete;
  GraphPool& operator=(const GraphPool&) = delete;
  ~GraphPool();
  /// The pool's device.
  [[nodiscard]] c10::Device device() const noexcept { return device_; }

 private:
  friend class GraphMemory;
  c10::Device device_;
  std::shared_ptr<GraphMemory> memory_;
};

}  // namespace sidestream
