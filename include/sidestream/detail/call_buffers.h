#pragma once
#include "sidestream/detail/argument_parts.h"
#include "sidestream/detail/export.h"

/// What `ss::call` is made of. Of no use to a trainer, and it may change at any time.
namespace sidestream::detail {

/// One call, taken apart, and what it gave.
struct CallBuffers {
  TensorBuffer inputs;
  GuardBuffer guards;
  ShapeBuffer shape;
  TensorBuffer outputs;
};

/// Empty buffers, lent by the calling thread for the lifetime of this object and kept by it between calls: however many tensors a
/// call has, it allocates nothing once one as large has run. A call inside of another is lent others.
/// Threads: begins and ends on one.
class [[nodiscard]] SIDESTREAM_API LentBuffers {
 public:
  LentBuffers();
  LentBuffers(const LentBuffers&) = delete;
  LentBuffers& operator=(const LentBuffers&) = delete;
  ~LentBuffers();
  [[nodiscard]] CallBuffers* operator->() const noexcept { return buffers_; }

 private:
  CallBuffers* buffers_;
};

}  // namespace sidestream::detail
