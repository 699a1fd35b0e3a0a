#pragma once
#include <cstdint>
#include <memory>
#include <thread>

#include <ATen/core/Tensor.h>

#include "sidestream/detail/export.h"

namespace sidestream {

class Recorder;

/// What autograd saves until the scope ends belongs to the group `name` (under the call and scopes around it; the innermost
/// scope owns). At the end of the scope the group leaves the device, if the options say so. Scopes nest and may be empty.
/// `name` must outlive the scope (a literal). Without an active step on this thread it does nothing.
/// Ordering: the copy waits for the work queued on the current stream so far.  Capture: legal.
/// Threads: begin and end on one thread, in reverse order, and before the step ends.  Throws: UsageError for an empty name or
/// one with a dot; a failure that an earlier scope kept.
/// Source: JAX's checkpoint_name; Megatron-LM's fine-grained activation offload.
class [[nodiscard]] SIDESTREAM_API OffloadScope {
 public:
  explicit OffloadScope(const char* name);
  OffloadScope(const OffloadScope&) = delete;
  OffloadScope& operator=(const OffloadScope&) = delete;
  /// Ends the scope; again, it does nothing. Throws: what the copy throws; UsageError on another thread, after the step, or while
  /// a scope inside is open.
  void end();
  /// Ends the scope where `end` has not. Never throws: a failure is kept, logged through LibTorch's warnings, and thrown by the
  /// next scope or call of the step, or by its end.
  ~OffloadScope();

 private:
  const char* name_;
  std::weak_ptr<Recorder* const> recorder_;
  std::uint64_t frame_ = 0;  ///< 0: nothing is to be ended
  std::thread::id thread_;
  int exceptions_ = 0;
};

/// Puts one tensor's storage into the group `name`, wherever it is saved later in the step, whichever scope that is in.
/// Returns `tensor`. The group ends with the scope or call that `tag` was called in.
SIDESTREAM_API at::Tensor tag(const at::Tensor& tensor, const char* name);

/// Keeps the tensor's storage on the device for as long as it lives [mark_not_offload]. Without an active step on this thread
/// it does nothing; OffloadEngine::mark_not_offload does the same outside of steps.
SIDESTREAM_API void mark_not_offload(const at::Tensor& tensor);

}  // namespace sidestream
