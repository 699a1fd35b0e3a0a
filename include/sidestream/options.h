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

/// Suffixes for byte counts, such as `32_GiB`. To use them, write `using namespace sidestream::literals;`.
inline namespace literals {
/// 1024 bytes.
constexpr std::size_t operator""_KiB(unsigned long long n) { return static_cast<std::size_t>(n) << 10; }
/// 1024 KiB.
constexpr std::size_t operator""_MiB(unsigned long long n) { return static_cast<std::size_t>(n) << 20; }
/// 1024 MiB.
constexpr std::size_t operator""_GiB(unsigned long long n) { return static_cast<std::size_t>(n) << 30; }
}  // namespace literals

/// What an OffloadEngine offloads, captures and checks.
///
/// Names are dotted, such as "blocks.3.core_attn". In a pattern `*` stands for one component, `**` for any number of them, and "all" is the
/// same as `**`. Braces hold alternatives and inclusive ranges of integers, as in "blocks.{0,4..20}.mlp". A component has at most one pair
/// of braces. An empty list, or "off", names nothing. If a pattern matches no call or scope of the first step, the second
/// OffloadEngine::step throws a UsageError that lists the names. A list with "all" or `**` in it is not checked. Tensors that are saved
/// outside of all calls and scopes have no name, so even "all" keeps them on the device.
/// Each option is a chained setter; without an argument it gives the value. A word in brackets is the option's name in Megatron-LM or
/// TransformerEngine.
class Options {
 public:
  /// Options of an engine that works on `device`, whichever device is current.
  explicit Options(c10::Device device) : device_(device) {}

  /// Adds a pattern (or a comma-separated list) of scopes whose saved tensors are offloaded [offload_modules].
  Options& offload(const std::string& patterns) {
    offload_.push_back(patterns);
    return *this;
  }
  /// Adds a pattern (or a comma-separated list) of eager scopes whose copies to the host wait for the next graph
  /// [delay_offload_until_cuda_graph].
  ///
  /// The copies are queued after the launch of the next forward or backward of a graphed call, so they run beside that graph. They do not
  /// compete with the eager work, or with the host's reads of the device, before it. Until then the group stays on the device, as far as
  /// `lag` allows.
  /// If no graph follows, the group is offloaded at the end of the step. If its backward comes before that, the group stays.
  /// In a sizing step the group is offloaded at once. So is a group that saves a tensor which a graph writes at each replay.
  /// Each pattern must match a scope that lies outside of graphed calls and that `offload` names as well.
  Options& delay(const std::string& patterns) {
    delay_.push_back(patterns);
    return *this;
  }
  /// Offloads at most `bytes` of the groups of `offload` that a pattern (or a comma-separated list) names; the others stay on the device.
  ///
  /// Groups are taken whole, in the order of the forward, while they fit: the earliest wait longest for their backward. A group counts in
  /// the first budget that names it; a second one with the same patterns is a UsageError. Each sequence of graphed calls (those that are
  /// captured together) has a budget of this size, and all eager groups of a step share one. In a sizing pass everything is offloaded. If a
  /// group stays because of a budget, GroupReport::kept_because says so.
  Options& offload_at_most(const std::string& patterns, std::size_t bytes) {
    budgets_.push_back({patterns, bytes, 1});
    return *this;
  }
  /// As `offload_at_most`, for a fraction from 0 to 1 of the bytes that would be offloaded of these groups [activation_offload_fraction,
  /// but of bytes].
  Options& offload_fraction(const std::string& patterns, double fraction) {
    budgets_.push_back({patterns, std::numeric_limits<std::size_t>::max(), fraction});
    return *this;
  }
  /// Adds a pattern (or a comma-separated list) of calls (`ss::call`) that are captured into graphs.
  Options& graph(const std::string& patterns) {
    graph_.push_back(patterns);
    return *this;
  }

  /// The engine's device.
  [[nodiscard]] c10::Device device() const { return device_; }
  /// What `offload` was given.
  [[nodiscard]] const std::vector<std::string>& offload_patterns() const { return offload_; }
  /// What `delay` was given.
  [[nodiscard]] const std::vector<std::string>& delay_patterns() const { return delay_; }
  /// What `offload_at_most` or `offload_fraction` was given.
  struct Budget {
    std::string patterns;                                         ///< of the groups
    std::size_t bytes = std::numeric_limits<std::size_t>::max();  ///< at most so many are offloaded
    double fraction = 1;                                          ///< and at most this part of them
  };
  /// What `offload_at_most` and `offload_fraction` were given.
  [[nodiscard]] const std::vector<Budget>& budgets() const { return budgets_; }
  /// What `graph` was given.
  [[nodiscard]] const std::vector<std::string>& graph_patterns() const { return graph_; }

  /// Hard cap on pinned host bytes. Groups that do not fit stay on the device, and the report names them. Not set: 80% of the memory
  /// that the system and the control group have available when the engine is made.
  TORCH_ARG(std::size_t, host_cap) = std::numeric_limits<std::size_t>::max();
  /// Storages with fewer bytes stay on the device [min_offloaded_tensor_size, but in bytes]. Report::exclusions counts them as "small".
  TORCH_ARG(std::size_t, min_bytes) = std::size_t{1} << 20;
  /// How many graphed calls of a sequence, and how many eager groups, may have copies to the host under way
  /// [max_inflight]. Beyond this number N, compute waits for the copies of the oldest one. `lag` also applies, and
  /// is at most the bytes of the N largest groups, or of the N + 1 largest calls. Not set: only `lag` limits them.
  TORCH_ARG(std::optional<int64_t>, groups_in_flight);
  /// How far copies to the host may trail behind compute, in device bytes. Graphed calls and eager groups each have a limit of this size.
  ///
  /// For calls it counts the bytes that the running call saves, and saved bytes whose copies no graph has waited for yet. For groups it
  /// counts saved bytes of groups that have ended and whose copies nothing has waited for yet. Tensors whose backward starts within this
  /// many bytes stay on the device, except in the first step and in a whole step (make_graphed_step). A value below the largest call or
  /// group is raised to that size.
  ///
  /// Not set, for calls: the sum of the `GraphOptions::side_streams` largest calls of a sequence, or of the two largest calls if
  /// `side_streams` is not set. If neither option is set, the engine raises this default on a GPU if that shortens the waits of forwards
  /// for copies. It computes these waits from the measured link speed and the times of the calls. It raises the default to at most half of
  /// the most bytes of groups in `offload` that await their backward at once in the sequence.
  /// Not set, for groups: the sum of the two largest. Delayed groups (see `delay`) between the same two graphed calls count as one.
  TORCH_ARG(std::optional<std::size_t>, lag);
  /// A budget of live device bytes, weights included: the engine chooses what is offloaded. Graphed calls of `ss::call`
  /// offload only what the budget requires. Without `offload` patterns everything may be offloaded, else what they name.
  ///
  /// At first the engine offloads all of it. It measures the second step that replays the graphs: its memory, the times of its graphs, and
  /// its waits for copies. Then it makes the plan, and captures the calls again. Report::forecast_peak_bytes and forecast_seconds say what
  /// a step will take from then on. The first steps take as much memory as a step with everything offloaded. A warm-up also needs the saved
  /// tensors of one call. Eager groups are always offloaded. Calls or shapes that are captured later follow the plan. If a step then
  /// exceeds the budget, a note says so. OffloadEngine::reset plans anew.
  ///
  /// A budget that is not above the bytes of weights and buffers, or is above the device's memory, is a UsageError when the engine is made.
  /// If a step or its captures exceed the budget with all offloaded, OffloadEngine::step throws a UsageError. Later steps then offload all.
  /// Needs `graph`. Not to be set together with `lag`, `lookahead`, `groups_in_flight`, `offload_at_most`, `offload_fraction`,
  /// GraphOptions::agree_to_capture and GradientPolicy::delayed. An engine with a budget makes no callables, buckets and graphed steps.
  TORCH_ARG(std::optional<std::size_t>, device_budget);
  /// How many device bytes may be reloaded before their backward needs them, in addition to the bytes of `lag` that are free by then.
  /// The next call or group is always reloaded while a backward runs.
  /// If it is not set, the engine plans it for calls from the measured link speed and the times of the calls: as many bytes as save time,
  /// and at most an eighth of the most bytes of a sequence that await their backward at once. On the simulated device, which keeps no time,
  /// it is then 0. For groups it is then 0 too.
  TORCH_ARG(std::optional<std::size_t>, lookahead);
  /// Writes the first N steps into a journal and checks it. Any two accesses to the same bytes, at least
  /// one of them a write, must be ordered by streams and events; Report::order_findings lists those that
  /// are not. 0: off, at no cost. If it is 0, the environment variable SIDESTREAM_CHECK_STEPS sets it.
  TORCH_ARG(int64_t, check_steps) = 0;
  /// Verifies the first N replays of each captured call, and after these one of every `verify_every` replays. The call also runs eagerly on
  /// the same inputs, buffers and random state; outputs, buffers and gradients are compared. The first difference is a VerificationError.
  ///
  /// A whole step counts as one call. Of it only the outputs (such as the losses) and the buffers are compared, but not the gradients, and
  /// not the parameters that its update writes.
  ///
  /// At most one call a step is verified, so the peak grows by one call's eager activations. A whole step must fit on the device without
  /// offload. The eager run's changes to tensors, and to default and named generators, are undone. Its changes to other members of modules
  /// are not. Replays under no_grad are never verified.
  /// 0: off, at no cost. If it is 0, the environment variable SIDESTREAM_VERIFY_REPLAYS sets it.
  TORCH_ARG(int64_t, verify_replays) = 0;
  /// With `verify_replays`: after the first replays, one of every `verify_every` replays of a call is verified. 0: no later ones.
  TORCH_ARG(int64_t, verify_every) = 100;
  /// With `verify_replays`: the largest allowed difference of floating-point elements, as a part of the tensor's largest magnitude. 0: all
  /// bits must be equal, except for the sign of a zero. Under LibTorch's deterministic algorithms it is always 0. If it is 0, the
  /// environment variable SIDESTREAM_VERIFY_TOLERANCE sets it.
  TORCH_ARG(double, verify_tolerance) = 0;
  /// Finds what makes the host wait in steps: values read on the host (`item`), results whose shape depends on data (`nonzero`), blocking
  /// and pageable copies, and synchronisations of events, streams and the device. From the third step in a row without a new capture on, it
  /// also finds device memory requested from the driver, pinning of host memory, and waits for the device inside operators.
  ///
  /// Report::syncs says where, how often, and what to use instead. Waits of the library itself and of other threads are not listed.
  /// With it each operator takes a little longer; without it there is no cost. SIDESTREAM_FIND_SYNCS=1 in the environment turns it on.
  TORCH_ARG(bool, find_syncs) = false;
  /// Called before each warm-up and capture, before the pinned memory of a plan is pinned, and after a plan for `device_budget` was made,
  /// so that a program can show its progress. The first step pins memory without a call. Not set: no cost.
  ///
  /// It may print, count and throw. It must not call into this engine or the device. It is never called inside a capture.
  /// Threads: called on the thread that needs the work: in OffloadEngine::step, in make_graphed_callables, make_bucketed_callables or
  /// make_graphed_step, or in a callable or GraphedStep that captures.
  /// Throws: an exception from it ends that call as a failed capture does, and nothing of the capture is left.
  TORCH_ARG(ProgressCallback, progress);
  /// How calls that match `graph` are captured and replayed.
  TORCH_ARG(GraphOptions, graph_options);
  /// What those calls do if they cannot replay a capture.
  TORCH_ARG(CallOptions, call_options);

 private:
  c10::Device device_;
  std::vector<std::string> offload_;
  std::vector<std::string> delay_;
  std::vector<std::string> graph_;
  std::vector<Budget> budgets_;
};

}  // namespace sidestream
