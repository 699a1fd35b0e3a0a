#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "runtime/cuda/libtorch_graph.h"
#include "runtime/handles.h"

namespace sidestream {
class Runtime;
}

namespace sidestream::cuda {

/// A capture that some runtime of the device has begun and not ended.
struct OpenCapture {
  c10::StreamId stream;
  std::thread::id thread;
  const Runtime* begun_by;
  libtorch::PoolId pool;
  std::unique_ptr<libtorch::Graph> graph;
};

/// The open captures of one device, of all runtimes in the process, and what is destroyed when they have ended: the driver forbids
/// some destructions while any stream of the device captures, whichever engine began that. One for each device, never destroyed.
/// Threads: any.
class OpenCaptures {
 public:
  [[nodiscard]] static OpenCaptures& of(c10::Device device);

  /// What the hot paths look at instead of asking the driver.
  [[nodiscard]] bool any() const noexcept { return count_.load(std::memory_order_acquire) != 0; }
  /// Begins by `begin`, one at a time. Throws: CaptureError when another capture allocates from `capture.pool`.
  template <class Begin>
  void open(OpenCapture capture, const Begin& begin) {
    const std::lock_guard lock(mutex_);
    refuse_shared_pool(capture.pool);
    open_.reserve(open_.size() + 1);
    begin(*capture.graph);
    open_.push_back(std::move(capture));
    count_.fetch_add(1, std::memory_order_release);
  }
  /// Takes the capture of `stream`, which the calling thread began. Throws: UsageError if there is none, or if another thread began it.
  [[nodiscard]] OpenCapture take(c10::Stream stream);
  /// The streams of the captures that the calling thread began.
  [[nodiscard]] std::vector<c10::StreamId> of_this_thread() const {
    return streams_where([](const OpenCapture& capture) { return capture.thread == std::this_thread::get_id(); });
  }
  /// The streams of the captures that `runtime` began.
  [[nodiscard]] std::vector<c10::StreamId> of_runtime(const Runtime& runtime) const {
    return streams_where([&](const OpenCapture& capture) { return capture.begun_by == &runtime; });
  }
  /// Drops the capture of `stream`, whoever began it.
  void drop(c10::StreamId stream) noexcept;

  /// Keeps `native` for `take_deferred`. False with no open capture.
  [[nodiscard]] bool defer(HandleKind kind, void* native);
  /// What is to be destroyed now; nothing while a capture is open.
  [[nodiscard]] std::vector<std::pair<HandleKind, void*>> take_deferred() noexcept;

 private:
  template <class Which>
  [[nodiscard]] std::vector<c10::StreamId> streams_where(const Which& which) const {
    const std::lock_guard lock(mutex_);
    std::vector<c10::StreamId> streams;
    for (const OpenCapture& capture : open_) {
      if (which(capture)) {
        streams.push_back(capture.stream);
      }
    }
    return streams;
  }
  void refuse_shared_pool(libtorch::PoolId pool) const;

  std::atomic<int> count_{0};
  mutable std::mutex mutex_;
  std::vector<OpenCapture> open_;
  std::vector<std::pair<HandleKind, void*>> deferred_;
};

}  // namespace sidestream::cuda
