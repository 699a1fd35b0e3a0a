#pragma once
#include <cstdint>

namespace sidestream::tracing {

/// What a range stands for; each has a registered name in the NVTX domain "sidestream".
enum class Range : std::uint8_t {
  warmup,
  capture_forward,
  capture_backward,
  launch_forward,
  launch_backward,
  offload,
  reload,
  sizing
};

/// A name registered once with NVTX (a group's or a call's), used as the payload text of ranges. Cheap to copy.
class Name {
 public:
  Name() = default;
  /// Registers "<range> <label>" for every kind of range. Not for the replay path. Threads: any.
  explicit Name(const char* label);

 private:
  friend class Scope;
  const void* registered_ = nullptr;  // table of registered strings, one a kind; lives as long as the process
};

/// An NVTX range on the calling thread: pushed at construction, popped at destruction.
/// Without an attached tool it costs one branch; never allocates. Capture: legal.
class [[nodiscard]] Scope {
 public:
  Scope(Range kind, const Name& name) noexcept;
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  ~Scope();
};

}  // namespace sidestream::tracing
