#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>

namespace sidestream {

/// What an engine does before calls replay: eager passes, page-locking host memory, captures.
enum class ProgressPhase : std::uint8_t { warm_up, pin, capture_forward, capture_backward };

/// A piece of that work that begins now.
struct Progress {
  ProgressPhase phase = ProgressPhase::warm_up;
  std::size_t index = 0;  ///< of the piece in its phase, from 0
  std::size_t count = 0;  ///< pieces in the phase
  std::string_view name;  ///< of the call; empty when pinning. Valid during the callback only
  std::size_t bytes = 0;  ///< of pinned host memory that the plan needs; 0 in the other phases
};

/// Hears of each piece of work before it begins: see Options::progress.
using ProgressCallback = std::function<void(const Progress&)>;

}  // namespace sidestream
