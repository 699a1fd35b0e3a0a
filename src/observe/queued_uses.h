#pragma once
#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include "runtime/stream_key.h"

namespace sidestream {

/// Storages that queued work of some stream uses and that LibTorch's allocators know it of: `record_stream`'s, and pinned ones
/// that an operator copies from or to. Once freed, such memory is handed out again when the allocator sees that work done.
/// Threads: one at a time.
class QueuedUses {
 public:
  struct Freed {
    StreamKey stream;
    const void* begin;
    std::size_t bytes;
  };

  void add(const at::Tensor& tensor, StreamKey stream);
  [[nodiscard]] bool empty() const noexcept { return uses_.empty(); }
  /// Memory that has been freed since the last call.
  [[nodiscard]] std::vector<Freed> take_freed();

 private:
  struct Use {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    Freed memory;
  };
  std::vector<Use> uses_;
};

}  // namespace sidestream
