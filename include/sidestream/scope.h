#pragma once
#include <ATen/core/Tensor.h>

#include "sidestream/export.h"

namespace sidestream {

/// What autograd saves until the scope ends belongs to the group `name` (under the call and scopes around it; the innermost
/// scope owns). At the end of the scope the group leaves the device, if the options say so. Scopes nest and may be empty.
/// `name` must outlive the scope (a literal). Without an active step on this thread it does nothing.
/// Ordering: the copy waits for the work queued on the current stream so far.  Capture: legal.
/// Threads: begin and end on one thread, in reverse order.  Throws: UsageError for an empty name or one with a dot.
/// Source: JAX's checkpoint_name; Megatron-LM's fine-grained activation offload.
class [[nodiscard]] SIDESTREAM_API OffloadScope {
 public:
  explicit OffloadScope(const char* name);
  OffloadScope(const OffloadScope&) = delete;
  OffloadScope& operator=(const OffloadScope&) = delete;
  /// Does not throw when the scope is left by an exception; else what the copy throws.
  ~OffloadScope() noexcept(false);

 private:
  void* recorder_ = nullptr;
  int exceptions_ = 0;
};

/// Puts one tensor's storage into the group `name`, wherever it is saved later in the step, whichever scope that is in.
/// Returns `tensor`. The group ends with the scope or call that `tag` was called in.
SIDESTREAM_API at::Tensor tag(const at::Tensor& tensor, const char* name);

/// Keeps the tensor's storage on the device for as long as it lives [mark_not_offload]. Without an active step on this thread
/// it does nothing; OffloadEngine::mark_not_offload does the same outside of steps.
SIDESTREAM_API void mark_not_offload(const at::Tensor& tensor);

}  // namespace sidestream
