#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

namespace sidestream {

/// Why a call that matches `graph` ran eagerly, though not to be recorded.
enum class EagerCause : std::uint8_t {
  no_grad,
  eval_mode,
  in_backward,    ///< a checkpoint that runs its forward again
  new_arguments,  ///< OnNewArguments::eager
  over_bound,     ///< CallOptions::max_captures
  unequal,        ///< an argument differs from its own copy
  shared_memory,  ///< a backward is pending of a capture that shares memory with the one that fits
  no_bucket,      ///< a bucketed call whose inputs fit no bucket
  other_mode,     ///< training flags or module options of a callable are not those of its capture
};

/// For the report.
[[nodiscard]] const char* text_of(EagerCause cause);
/// What keeps the calling thread's calls from being captured or replayed now; eval mode where nothing else does.
[[nodiscard]] EagerCause cause_on_this_thread();

/// One call's eager runs by cause.
class EagerRuns {
 public:
  static constexpr std::size_t kCauses = 9;

  void count(EagerCause cause) noexcept { ++runs_[static_cast<std::size_t>(cause)]; }
  [[nodiscard]] std::int64_t of(EagerCause cause) const noexcept { return runs_[static_cast<std::size_t>(cause)]; }

 private:
  std::array<std::int64_t, kCauses> runs_{};
};

}  // namespace sidestream
