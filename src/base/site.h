#pragma once
#include <cstdint>
#include <string>
#include <string_view>

#include "sidestream/detail/export.h"

namespace sidestream {

/// What is done at a site. Each activity has a registered name in the NVTX domain "sidestream".
enum class Activity : std::uint8_t {
  warmup,
  capture_forward,
  capture_backward,
  capture_weights,
  launch_forward,
  launch_backward,
  launch_weights,
  offload,
  reload,
  sizing
};

/// The journal's word for it: "forward", "backward", "weights", "offload" or "reload". Empty for warm-up and sizing, whose operators are
/// placed by the scopes that they run in.
[[nodiscard]] constexpr std::string_view phase_of(Activity activity) noexcept {
  switch (activity) {
    case Activity::capture_forward:
    case Activity::launch_forward:
      return "forward";
    case Activity::capture_backward:
    case Activity::launch_backward:
      return "backward";
    case Activity::capture_weights:
    case Activity::launch_weights:
      return "weights";
    case Activity::offload:
      return "offload";
    case Activity::reload:
      return "reload";
    case Activity::warmup:
    case Activity::sizing:
      return {};
  }
  return {};
}

/// The name of a call or a group as sites show it: registered with NVTX once, at construction. Empty: no name.
class SIDESTREAM_API SiteName {
 public:
  SiteName() = default;
  /// Not for the replay path. Threads: any.
  explicit SiteName(std::string text);

  [[nodiscard]] const std::string& text() const noexcept { return text_; }

 private:
  friend class NvtxRange;
  std::string text_;
  const void* registered_ = nullptr;  // table of registered strings, one an activity; lives as long as the process
};

/// An NVTX range on the calling thread: pushed at construction, popped at destruction.
/// Without an attached tool it costs one branch; never allocates.
class SIDESTREAM_API NvtxRange {
 public:
  NvtxRange(Activity activity, const SiteName& name) noexcept;
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
  ~NvtxRange();
};

/// Says for its lifetime where in the program the calling thread issues work: a profiler sees an NVTX range, and a journal or a
/// recording writes phase and name of the innermost site beside each operation.
/// Beyond the range it costs two writes to a thread's own memory; never allocates. Capture: legal.
/// Threads: ends on the thread it began on, in reverse order.
class [[nodiscard]] SIDESTREAM_API Site {
 public:
  /// `name` must outlive this object.
  Site(Activity activity, const SiteName& name) noexcept
      : range_(activity, name), phase_(phase_of(activity)), name_(&name), before_(innermost_) {
    if (!phase_.empty()) {
      innermost_ = this;
    }
  }
  Site(Activity activity, SiteName&& name) = delete;
  Site(const Site&) = delete;
  Site& operator=(const Site&) = delete;
  ~Site() {
    if (!phase_.empty()) {
      innermost_ = before_;
    }
  }

  /// Null outside of any site that has a phase.
  [[nodiscard]] static const Site* innermost() noexcept { return innermost_; }
  [[nodiscard]] std::string_view phase() const noexcept { return phase_; }
  [[nodiscard]] std::string_view name() const noexcept { return name_->text(); }

 private:
  NvtxRange range_;
  std::string_view phase_;
  const SiteName* name_;
  const Site* before_;
  static thread_local constinit const Site* innermost_;
};

}  // namespace sidestream
