#pragma once
#include <cstdint>
#include <string>

namespace sidestream {

class EngineChains;
struct EngineResources;
class Recorder;

/// Notices that the device ran out of memory while it lived, whoever asked for it and whatever became of the error.
class MemoryShortage {
 public:
  /// `resources` must outlive this object.
  explicit MemoryShortage(const EngineResources& resources);
  [[nodiscard]] bool met() const;
  /// Where it was met: says by LibTorch's warnings what held the memory in the step of `recorder` and what else may leave. The
  /// error, which is on its way through the user's code, knows neither.
  void warn(const EngineChains& chains, const Recorder& recorder) const noexcept;
  /// Inside of a handler: the error is the allocator's.
  [[nodiscard]] bool is_the_error() const;
  /// Inside of a handler, for a capture: where it was met, throws the allocator's error as a DeviceError that says so; else the
  /// error as it is.
  [[noreturn]] void rethrow(const EngineChains& chains) const;

 private:
  /// Empty where it was not met.
  [[nodiscard]] std::string text(const EngineChains& chains, const Recorder* recorder) const noexcept;

  const EngineResources& resources_;
  std::int64_t refusals_;
  std::int64_t allocated_;
};

}  // namespace sidestream
