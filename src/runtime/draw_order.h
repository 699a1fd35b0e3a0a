#pragma once
#include <memory>
#include <mutex>

#include "runtime/capture_turn.h"
#include "runtime/runtime.h"

namespace sidestream {

/// Orders the launches of graphs that draw random numbers, on one device, across all engines of the process.
///
/// Note [Seed and offset of graphs]
///   A    launch: write seed and offset, graph that draws --+ latest
///                                                          v
///   B                                          (wait) launch: write seed and offset, graph that draws --+ latest
///
/// Each launch of a graph that draws waits for the latest one, on whatever stream that was, and marks itself as the latest. LibTorch
/// keeps one seed and one offset of each generator in device memory for all graphs of a device. A launch writes them on its stream, and
/// the graph's kernels read them. Launches on unordered streams would overwrite the values while another graph's kernels read them.
///
/// A capture's stream waits in the same way, and is the latest when the capture ends, because its begin writes these values too.
///
/// One order serves all generators: graphs that draw from different ones wait for each other too.
///
/// Graphs that draw nothing pay nothing. Threads: any.
class DrawOrder {
 public:
  explicit DrawOrder(c10::Device device);
  [[nodiscard]] static DrawOrder& of(c10::Device device);
  DrawOrder(const DrawOrder&) = delete;
  DrawOrder& operator=(const DrawOrder&) = delete;
  ~DrawOrder() = delete;  // there is one for each device, for the life of the process

  /// Locks `other` and this order, for `launch`. Waits for captures without `other`: they may need it, and so may autograd's thread, which
  /// works for them.
  /// Throws: UsageError in a backward pass while another thread captures; nothing is locked then.
  [[nodiscard]] std::unique_lock<std::mutex> lock_with(std::unique_lock<std::recursive_mutex>& other) {
    for (;;) {
      CaptureTurn::let_others_finish(device_, "a graph that draws random numbers is replayed by a backward pass");
      other.lock();
      std::unique_lock lock(mutex_, std::try_to_lock);
      if (lock && !CaptureTurn::others(device_)) [[likely]] {
        return lock;
      }
      other.unlock();
      if (!lock) {
        lock.lock();  // until its holder has launched
      }
    }
  }
  /// Calls `launch`, which uses `stream` of `runtime`, so that its work is after the latest launch that drew. The thread has what
  /// `lock_with` returned.
  template <class Launch>
  void launch(Runtime& runtime, c10::Stream stream, const Launch& launch) {
    wait(runtime, stream);
    launch();
    mark(runtime, stream);
  }

  /// While one lives, its stream is used to capture. The thread has the device's CaptureTurn.
  class [[nodiscard]] Capturing {
   public:
    Capturing(DrawOrder& order, Runtime& runtime, c10::Stream stream);
    Capturing(const Capturing&) = delete;
    Capturing& operator=(const Capturing&) = delete;
    ~Capturing();

   private:
    DrawOrder& order_;
    Runtime& runtime_;
    c10::Stream stream_;
  };

 private:
  void wait(Runtime& runtime, c10::Stream stream) const;
  void mark(Runtime& runtime, c10::Stream stream);

  const c10::Device device_;
  const std::shared_ptr<Runtime> owner_;  ///< of the event
  const Event latest_;
  std::mutex mutex_;
  bool marked_ = false;
};

}  // namespace sidestream
