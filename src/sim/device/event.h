#pragma once
#include <chrono>
#include <cstdint>
#include <vector>

#include <c10/util/intrusive_ptr.h>

namespace sidestream::sim {

/// Number of a piece of queued work; rises with issue order. `no_work` stands for work that is done for certain.
using WorkId = std::uint64_t;
inline constexpr WorkId no_work = 0;

/// An event of the sim device: a counter of versions. A record, or the launch of a graph that holds the record node, makes a
/// new version at host time; a wait binds the version current at its call. Version 0 was never recorded.
struct EventState : c10::intrusive_ptr_target {
  explicit EventState(bool is_external) noexcept : external(is_external) {}

  const bool external;
  std::uint64_t version = 0;
  WorkId mark = no_work;  ///< the work whose end completes the current version
  std::chrono::steady_clock::time_point done_at{};

  std::uint64_t capture = 0;  ///< number of the capture that recorded it last; 0: recorded outside of any
  std::vector<std::uint32_t> capture_marks;  ///< nodes of that capture which the mark stands for
};

}  // namespace sidestream::sim
