#include "runtime/cuda/open_captures.h"

#include <algorithm>

#include "runtime/each_device.h"
#include "sidestream/error.h"

namespace sidestream::cuda {

OpenCaptures& OpenCaptures::of(c10::Device device) {
  return of_device<OpenCaptures>(device, [] { return new OpenCaptures(); });
}

void OpenCaptures::refuse_shared_pool(libtorch::PoolId pool) const {
  if (std::any_of(open_.begin(), open_.end(), [&](const OpenCapture& other) { return other.pool == pool; })) {
    throw CaptureError("another capture allocates from this memory pool; end it first");
  }
}

OpenCapture OpenCaptures::take(c10::Stream stream) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(open_.begin(), open_.end(),
                                  [&](const OpenCapture& capture) { return capture.stream == stream.id(); });
  if (found == open_.end()) {
    throw UsageError("no capture was begun on this stream");
  }
  if (found->thread != std::this_thread::get_id()) {
    throw UsageError("a capture is ended by the thread that began it");
  }
  OpenCapture capture = std::move(*found);
  open_.erase(found);
  count_.fetch_sub(1, std::memory_order_release);
  return capture;
}

void OpenCaptures::drop(c10::StreamId stream) noexcept {
  std::unique_ptr<libtorch::Graph> graph;
  {
    const std::lock_guard lock(mutex_);
    const auto found =
        std::find_if(open_.begin(), open_.end(), [&](const OpenCapture& capture) { return capture.stream == stream; });
    if (found == open_.end()) {
      return;
    }
    graph = std::move(found->graph);
    open_.erase(found);
    count_.fetch_sub(1, std::memory_order_release);
  }
  (void)graph->end();
}

bool OpenCaptures::defer(HandleKind kind, void* native) {
  const std::lock_guard lock(mutex_);
  if (open_.empty()) {
    return false;
  }
  deferred_.emplace_back(kind, native);
  return true;
}

std::vector<std::pair<HandleKind, void*>> OpenCaptures::take_deferred() noexcept {
  const std::lock_guard lock(mutex_);
  std::vector<std::pair<HandleKind, void*>> deferred;
  if (open_.empty()) {
    deferred.swap(deferred_);
  }
  return deferred;
}

}  // namespace sidestream::cuda
