#pragma once
#include "sidestream/detail/argument_parts.h"
#include "sidestream/detail/export.h"

/// Internals of `ss::call`, which may change at any time.
namespace sidestream::detail {

/// One call, taken apart, and its outputs.
struct CallBuffers {
  TensorBuffer inputs;
  GuardBuffer guards;
  ShapeBuffer shape;
  TensorBuffer outputs;
};

/// Empty buffers. The calling thread keeps them between calls and lends them for the lifetime of this object. So a call allocates nothing
/// if a call with as many tensors has run before. A call inside another call gets other buffers.
/// Threads: begins and ends on one thread.
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
