#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <torch/arg.h>

#include "sidestream/call_options.h"
#include "sidestream/graph_options.h"
#include "sidestream/progress.h"

namespace sidestream {

/// 32_GiB and the like for byte counts.
inline namespace literals {
constexpr std::size_t operator""_KiB(unsigned long long n) { return static_cast<std::size_t>(n) << 10; }
constexpr std::size_t operator""_MiB(unsigned long long n) { return static_cast<std::size_t>(n) << 20; }
constexpr std::size_t operator""_GiB(unsigned long long n) { return static_cast<std::size_t>(n) << 30; }
}  // namespace literals

/// What an OffloadEngine does. Names are dotted ("blocks.3.core_attn"); in patterns `*` is one component, `**` any number,
/// "all" is `**`. Braces hold alternatives and inclusive ranges of integers: "blocks.{0,4..20}.mlp", one pair between two dots.
/// A pattern that matches no call or scope of the sizing pass is a UsageError that lists the names there are.
class Options {
 public:
  explicit Options(c10::Device device) : device_(device) {}

  /// Adds a pattern (or a comma list) of scopes whose saved tensors leave the device [offload_modules].
  Options& offload(const std::string& patterns) {
    offload_.push_back(patterns);
    return *this;
  }
  /// Adds a pattern (or a comma list) of scopes outside of graphed calls that leave behind the next graph: their copies to the host
  /// are queued when the next forward or backward of a graphed call has been launched, so that they run beside it and not beside the
  /// eager work, or the host's reads of the device, in between [delay_offload_until_cuda_graph]. Until then they stay, as far as
  /// `lag` allows. What no graph follows leaves at the step's end, and what its backward needs before that stays where it is. In
  /// sizing steps, and where a group saves what a graph writes anew, it leaves at once. Each pattern must match a scope that
  /// `offload` names.
  Options& delay(const std::string& patterns) {
    delay_.push_back(patterns);
    return *this;
  }
  /// Adds a pattern (or a comma list) of `ss::call` names that are captured into graphs.
  Options& graph(const std::string& patterns) {
    graph_.push_back(patterns);
    return *this;
  }

  [[nodiscard]] c10::Device device() const { return device_; }
  [[nodiscard]] const std::vector<std::string>& offload_patterns() const { return offload_; }
  [[nodiscard]] const std::vector<std::string>& delay_patterns() const { return delay_; }
  [[nodiscard]] const std::vector<std::string>& graph_patterns() const { return graph_; }

  /// Hard cap on pinned host bytes; groups that do not fit stay on the device and the report says which. Where it is left as it
  /// is: 80% of the memory that the system, and the control group, have available when the engine is made.
  TORCH_ARG(std::size_t, host_cap) = std::numeric_limits<std::size_t>::max();
  /// Storages with fewer bytes leave only where a group saves as many bytes in such storages of its own: they are gathered into one
  /// block of device memory, which leaves in their place. Else they stay on the device [min_offloaded_tensor_size, but in bytes].
  TORCH_ARG(std::size_t, min_bytes) = std::size_t{1} << 20;
  /// How many eager groups may trail as well, beside `lag`, before the stream that saved them waits for the oldest's copies
  /// [max_inflight]. None: the bytes alone say it.
  TORCH_ARG(std::optional<int64_t>, groups_in_flight);
  /// How far copies to the host may trail, in device bytes, of graphed calls and of eager groups each. Of calls: what they saved
  /// whose copies are not waited for yet, with that of the call that runs. Of groups: the same, of those that have ended. What
  /// turns round within it never leaves. Raised to the largest call's or group's bytes where it is less. None: as much as the
  /// largest calls of a chain save, as many as `side_streams`, else two; on a device with a clock more, where by the measured link
  /// and the calls' times forwards would else wait for copies and need not with up to half of what is to leave. Of groups: as much
  /// as the two largest; those that are delayed (see `delay`) and lie between the same graphed calls count as one.
  TORCH_ARG(std::optional<std::size_t>, lag);
  /// How many device bytes may be back before the backward that needs them, beyond those of `lag` that are free by then. The next
  /// call's, or group's, are always brought back while a backward runs. None: of calls, what the measured link and times gain by,
  /// but no more than an eighth of what is offloaded, and nothing on a device without a clock; of groups, nothing.
  TORCH_ARG(std::optional<std::size_t>, lookahead);
  /// The first so many steps are written into a journal and checked: every two accesses to the same bytes, at least one a
  /// write, must be ordered by streams and events. Report::order_findings says what is not. 0: off, at no cost. The environment
  /// variable SIDESTREAM_CHECK_STEPS sets it where this is 0.
  TORCH_ARG(int64_t, check_steps) = 0;
  /// So many replays of each captured call are verified as soon as they come, and later one in `verify_every`: the call also runs
  /// eagerly, on the same inputs, buffers and random state, and outputs, buffers and gradients are compared. The first difference
  /// is a VerificationError. At most one call a step, so that the peak grows by one call's eager activations: a whole step is one call,
  /// so that it must fit without offload. What the eager run does to tensors and to default and named generators is put back, to other
  /// members of modules not. 0: off, at no cost. The environment variable SIDESTREAM_VERIFY_REPLAYS sets it where this is 0.
  TORCH_ARG(int64_t, verify_replays) = 0;
  /// With `verify_replays`: each so many-th replay of a call is verified after the first ones; 0: none.
  TORCH_ARG(int64_t, verify_every) = 100;
  /// With `verify_replays`: how far floating-point elements may lie apart, as a part of the tensor's largest magnitude. 0: bit for
  /// bit (zeros of either sign are equal), as always under LibTorch's deterministic algorithms. The environment variable
  /// SIDESTREAM_VERIFY_TOLERANCE sets it where this is 0.
  TORCH_ARG(double, verify_tolerance) = 0;
  /// Finds what makes the host wait in steps: values read on the host (`item`), results whose shape depends on data (`nonzero`), blocking
  /// and pageable copies, synchronisations of events, streams and the device, and, in steps that are like the one before, device
  /// memory asked of the driver and host memory pinned. Report::syncs says where, how often, and what to use instead. What the library itself waits for, and
  /// other threads' waits, are no findings. Every operator costs some more time. The environment variable SIDESTREAM_FIND_SYNCS=1 sets
  /// it where it is not set here. Off: no cost.
  TORCH_ARG(bool, find_syncs) = false;
  /// Hears of each warm-up, capture and pinning before it begins, so that a program can show that it works. None: no cost.
  /// Never called inside a capture. It may print, count and throw; it must not call into this engine or the device.
  /// Threads: called by the thread that makes the work necessary: in OffloadEngine::step, make_graphed_callables, or a
  /// GraphedCallable that captures again.  Throws: what it throws ends that call as a failed capture does; nothing of the
  /// capture is left.
  TORCH_ARG(ProgressCallback, progress);
  /// How calls that match `graph` are captured and replayed.
  TORCH_ARG(GraphOptions, graph_options);
  /// What those calls do where they cannot replay what was captured.
  TORCH_ARG(CallOptions, call_options);

 private:
  c10::Device device_;
  std::vector<std::string> offload_;
  std::vector<std::string> delay_;
  std::vector<std::string> graph_;
};

}  // namespace sidestream
