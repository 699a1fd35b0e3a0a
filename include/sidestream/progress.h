#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>

namespace sidestream {

/// What an engine does before calls replay.
enum class ProgressPhase : std::uint8_t {
  warm_up,           ///< an eager pass before the capture
  pin,               ///< page-locks host memory
  capture_forward,   ///< captures the forward of a call
  capture_backward,  ///< captures the backward of a call
  plan,              ///< a plan for Options::device_budget was made, and the calls were captured again
};

/// One piece of that work. The callback is called just before the piece begins; in the phase `plan`, after the plan was made.
struct Progress {
  ProgressPhase phase = ProgressPhase::warm_up;  ///< the kind of work
  std::size_t index = 0;                         ///< index of the piece in its phase, from 0
  std::size_t count = 0;                         ///< number of pieces in the phase
  /// Name of the call. Empty in the phase `pin`. In the phase `plan`, a sentence with the forecast. Valid only during the callback.
  std::string_view name;
  /// In the phase `pin`: pinned host memory that the plan needs. In the phase `plan`: the expected peak of device memory. Else 0.
  std::size_t bytes = 0;
};

/// Called before each piece of work: see Options::progress.
using ProgressCallback = std::function<void(const Progress&)>;

}  // namespace sidestream
