#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>

#include "runtime/live_memory.h"
#include "runtime/runtime.h"

namespace sidestream {

/// How much device memory a step takes besides the calls that will be graphs. It is learned in the sizing step, so that captures do not
/// use that memory. It measures how much live memory grew outside of those calls: before each call, and from the last call until backward
/// reaches one. Memory that is offloaded or freed in that time lowers the number, so it is no bound. Threads: any.
class EagerMemoryEstimate {
 public:
  explicit EagerMemoryEstimate(std::shared_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {}

  /// A sizing step begins, or one without calls to come.
  void step_begins();
  /// Around the eager run of a call that will be captured. In other steps they do nothing.
  void call_begins();
  void call_ends();
  /// Of such a call; nothing is counted from here on.
  void backward_begins() noexcept;
  void step_ends() noexcept;

  /// Bytes, at most at one moment; 0 if no sizing step has ended.
  [[nodiscard]] std::int64_t bytes() const;

 private:
  void look();

  std::shared_ptr<Runtime> runtime_;
  mutable std::mutex mutex_;
  bool counting_ = false;
  std::int64_t live_at_begin_ = 0;
  std::int64_t bytes_ = 0;
  std::optional<LiveMemory::Measurement> measurement_;
};

}  // namespace sidestream
