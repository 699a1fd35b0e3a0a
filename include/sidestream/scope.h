#pragma once
#include <cstdint>
#include <memory>
#include <thread>

#include <ATen/core/Tensor.h>

#include "sidestream/detail/export.h"

namespace sidestream {

class EagerOffload;
class SavedTensorRecorder;
struct Group;

/// Puts all tensors that autograd saves inside the scope into the group `name`. If Options::offload names the group, it is offloaded
/// at the end of the scope.
///
/// The group's full name begins with the names of the call and the scopes around it. Scopes nest and may be empty; a tensor belongs to the
/// innermost scope. `name` must outlive the object (a literal does). Without an active step on this thread the scope does nothing.
/// Ordering: the copy waits for the work queued on the current stream so far.  Capture: legal.
/// Threads: scopes begin and end on one thread, in reverse order, before the step ends.
/// Throws: UsageError for an empty name or one with a dot. The failure of an earlier scope's destructor.
/// Source: JAX's checkpoint_name; Megatron-LM's fine-grained activation offload.
///
/// **Groups by hand.** After the scope's end, the object is a handle of the scope's group, and of the groups that `tag` made inside of it.
/// With the handle a program decides when these groups are offloaded and reloaded. If it does not decide, the engine treats them like all
/// others.
/// Without an active step, and for groups that are not offloaded, these functions do nothing.
/// Capture: UsageError in a call that is captured; in a whole step (`make_graphed_step`) legal.
/// Threads: any, while the thread of the step waits for it, as in a backward's hooks. They do not wait on the host.
/// Throws: UsageError before the scope's end and after the step; errors of the copies.
/// Source: TransformerEngine's ManualOffloadSynchronizer; Megatron-LM's group_offload and flush_delayed_groups.
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

  /// Ends the scope as `end` does, but delays the copies to the host, as Options::delay does. They are queued at `start_offload`,
  /// `finish_offload`, `offload_delayed`, the next launch of a graph, or the step's end, whichever comes first [delay_offload].
  /// Until then the group stays on the device, as far as Options::lag allows. If its backward comes before that, it stays.
  /// In a sizing step the group is offloaded at once, and so is a group with memory that a graph writes at each replay.
  /// Throws: as `end`; UsageError if the scope has ended.
  void end_later();
  /// Queues the copies to the host of delayed groups. If they are queued already, it does nothing [start_offload_layer].
  void start_offload();
  /// Lets the stream that saved the groups wait for their copies to the host, and frees the device memory there. Delayed groups are
  /// offloaded first [release_activation_forward_gpu_memory].
  void finish_offload();
  /// Queues the reload of groups whose device memory was freed, before their backward asks for it [start_reload_layer].
  /// Groups that are still on the device are not copied; delayed groups stay there.
  void start_reload();
  /// Takes the storage away from `tensor` and from all its views, and leaves it to the group. So the device memory is freed after its copy,
  /// although the program still has the tensor [forced_released_tensors]. The scope must have ended, and `tensor` must be in one of its
  /// groups. Afterwards, each read of the tensor, or of a view of the same storage, throws a c10::Error with the group's name, also in a
  /// capture. The backward is not affected.
  /// Threads: that of the scope.
  /// Throws: UsageError for a tensor that is in no group of the scope or is sparse, nested or quantised. Also for memory of a graph or a
  /// TensorPool, and for other memory that LibTorch did not allocate.
  void release(const at::Tensor& tensor);

 private:
  void leave(bool later);
  [[nodiscard]] SavedTensorRecorder* ended(const char* function) const;
  void by_hand(const char* function, void (EagerOffload::*act)(const Group&)) const;

  const char* name_;
  std::weak_ptr<SavedTensorRecorder* const> recorder_;
  std::uint64_t frame_ = 0;  ///< 0: ended, or never begun
  std::thread::id thread_;   ///< none if the scope began outside of a step
  Group* groups_ = nullptr;  ///< those of the scope, once it has ended
  int exceptions_ = 0;
};

/// Puts one tensor's storage into the group `name`, whichever scope saves it later in the step. Returns `tensor`.
/// The group ends with the scope or call in which `tag` was called. Without an active step on this thread it only returns `tensor`.
/// Throws: UsageError for an empty name or one with a dot.
SIDESTREAM_API at::Tensor tag(const at::Tensor& tensor, const char* name);

/// Tells the engine that the work queued on the current stream until now completes the value of `tensor`. If a group offloads the tensor's
/// storage, the copy waits only for that work, and not for all work before the end of the group [start_offload(tensor)]. Call it before or
/// after autograd saves the tensor, and before the group ends. If the tensor is written later, the call has no effect.
/// Without an active step on this thread it does nothing.
/// Throws: UsageError in a call that is captured.
SIDESTREAM_API void mark_ready(const at::Tensor& tensor);

/// Queues the copies to the host of all groups of this step that are delayed, by OffloadScope::end_later or Options::delay, the oldest
/// first. Without an active step on this thread it does nothing [flush_delayed_groups].
/// Throws: UsageError in a call that is captured; errors of the copies.
SIDESTREAM_API void offload_delayed();

/// Keeps the tensor's storage on the device for as long as the storage lives [mark_not_offload]. Call it before the end of the scope that
/// saves the tensor, because the copies begin there. Outside of steps it does nothing: use OffloadEngine::mark_not_offload there.
/// A mark between graphed calls of ss::call counts in their captures only if the recorded step made it; replays do not see later marks.
/// For callables, mark the argument inside the body.
SIDESTREAM_API void mark_not_offload(const at::Tensor& tensor);

}  // namespace sidestream
