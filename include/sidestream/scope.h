#pragma once
#include <cstdint>
#include <memory>
#include <thread>

#include <ATen/core/Tensor.h>

#include "sidestream/detail/export.h"

namespace sidestream {

class SavedTensorRecorder;

/// Puts all tensors that autograd saves inside the scope into the group `name`. If Options::offload names the group, it is offloaded
/// at the end of the scope.
///
/// The group's full name begins with the names of the call and the scopes around it. Scopes nest and may be empty; a tensor belongs to the
/// innermost scope. `name` must outlive the scope (a literal does). Without an active step on this thread the scope does nothing.
/// Ordering: the copy waits for the work queued on the current stream so far.  Capture: legal.
/// Threads: scopes begin and end on one thread, in reverse order, before the step ends.
/// Throws: UsageError for an empty name or one with a dot. The failure of an earlier scope's destructor.
/// Source: JAX's checkpoint_name; Megatron-LM's fine-grained activation offload.
class [[nodiscard]] SIDESTREAM_API OffloadScope {
 public:
  /// Begins the scope.
  explicit OffloadScope(const char* name);
  OffloadScope(const OffloadScope&) = delete;
  OffloadScope& operator=(const OffloadScope&) = delete;
  /// Ends the scope. A second call does nothing.  Throws: errors of the copy; UsageError on another thread, after the step, and while a
  /// scope inside is open.
  void end();
  /// Ends the scope if `end` has not. Never throws: a failure is logged as a LibTorch warning and kept. The step's next scope, or its next
  /// call that runs eagerly, throws it. If there is none, Step::finish throws it, or after ~Step the engine's next `step()`.
  ~OffloadScope();

 private:
  const char* name_;
  std::weak_ptr<SavedTensorRecorder* const> recorder_;
  std::uint64_t frame_ = 0;  ///< 0: ended, or never begun
  std::thread::id thread_;
  int exceptions_ = 0;
};

/// Puts one tensor's storage into the group `name`, whichever scope saves it later in the step. Returns `tensor`.
/// The group ends with the scope or call in which `tag` was called. Without an active step on this thread it only returns `tensor`.
/// Throws: UsageError for an empty name or one with a dot.
SIDESTREAM_API at::Tensor tag(const at::Tensor& tensor, const char* name);

/// Keeps the tensor's storage on the device for as long as the storage lives [mark_not_offload]. Without an active step on this thread it
/// does nothing: outside of steps use OffloadEngine::mark_not_offload.
SIDESTREAM_API void mark_not_offload(const at::Tensor& tensor);

}  // namespace sidestream
