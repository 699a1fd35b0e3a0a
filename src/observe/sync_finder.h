#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include <ATen/record_function.h>
#include <c10/core/Device.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "sidestream/report.h"

namespace sidestream {

/// Where in a program the host waits. The names live as long as the finder; null if there is none.
struct WaitPlace {
  const std::string* call = nullptr;   ///< the graphed call
  const std::string* scope = nullptr;  ///< the innermost scope or call
  std::string node;                    ///< of a backward: the autograd node whose backward, or hook, runs
};

/// Counts what makes the host wait in an engine's steps, by kind, operator, place and stack (Options::find_syncs).
/// Threads: steps one at a time; findings any.
class SyncFinder {
 public:
  /// Tells where the calling thread is: called under the finder's lock, it must not wait for anything.
  using Place = std::function<WaitPlace()>;

  enum class OperatorEdge : std::uint8_t { begins, ends };

  /// `passed`, if any, is called on a step's own thread before and after each operator that is in no other.
  SyncFinder(c10::DeviceType type, Place place, std::function<void(OperatorEdge)> passed);
  SyncFinder(const SyncFinder&) = delete;
  SyncFinder& operator=(const SyncFinder&) = delete;
  ~SyncFinder();

  /// While it lives, waits of the calling thread, and of backward passes that it starts, are found. Other threads' are not: they do
  /// not hold up the step. Steps of several engines nest, the innermost finds.
  class [[nodiscard]] Step;
  /// While it lives, nothing of the calling thread and of the backward passes that it starts is found: what runs then is the
  /// library's own doing.
  class [[nodiscard]] Pause;

  /// From here on the steps of the calling thread, of all engines, are not steady: a capture takes memory that they had.
  static void unsettle();
  /// How often this finder's steps have been so until now.
  [[nodiscard]] std::int64_t unsettled() const;

  /// Distinct findings, the most frequent first, and how many more were counted and are not among them.
  void add_to(Report& report) const;

 private:
  friend struct SyncFinderHears;
  struct State;
  struct Link;
  std::shared_ptr<State> state_;
};

class SyncFinder::Step {
 public:
  /// `steady`: allocations of device memory and of pinned memory are findings too, and waits for the device inside of operators.
  Step(SyncFinder& finder, bool steady);
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;
  /// On another thread than it began on, what it registered stays there and finds nothing.
  ~Step();

 private:
  std::shared_ptr<Link> link_;
  std::thread::id thread_ = std::this_thread::get_id();
  std::unique_ptr<c10::DebugInfoGuard> info_;
  at::CallbackHandle callback_ = at::INVALID_CALLBACK_HANDLE;
};

class SyncFinder::Pause {
 public:
  Pause();
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;
  ~Pause() = default;

 private:
  std::optional<c10::DebugInfoGuard> info_;
};

}  // namespace sidestream
