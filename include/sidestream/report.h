#pragma once
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "sidestream/detail/export.h"

namespace sidestream {

/// One group of the plan.
struct GroupReport {
  std::string name;  ///< full name, such as "blocks.3.core_attn"
  /// Bytes of the storages that this group saves first, each storage once. In an order a group stands here once for all microbatches that
  /// take turns in its place on the host, and counts the storages of each.
  std::int64_t bytes = 0;
  std::int64_t offloaded_bytes = 0;  ///< how many of them are offloaded
  std::string kept_because;          ///< why the rest stays on the device; empty if all of it is offloaded
  std::int64_t shared_bytes = 0;     ///< of storages that it saves too, and that an earlier group counts
};

/// One chunk of a step.
struct ChunkReport {
  std::int64_t stage = 0;            ///< its virtual stage
  std::int64_t microbatch = 0;       ///< its microbatch
  std::int64_t offloaded_bytes = 0;  ///< bytes whose copies to the host were queued while it was the active chunk
  double offload_seconds = 0;        ///< in the traced step: how long its copies to the host ran
  double reload_seconds = 0;         ///< in the traced step: how long its copies to the device ran
  double waited_seconds = 0;         ///< in the traced step: how long its compute waited for copies
};

/// What a call or a group did in the step that was traced. Times are the device's; 0 if it keeps none.
struct TimesReport {
  std::string name;                  ///< full name, such as "blocks.3"
  double forward_seconds = 0;        ///< how long its forward graphs ran
  double backward_seconds = 0;       ///< how long its backward graphs ran, and those of delayed weight gradients
  double waited_seconds = 0;         ///< how long compute waited here for copies
  double offload_seconds = 0;        ///< how long its copies to the host ran
  double reload_seconds = 0;         ///< how long its copies to the device ran
  std::int64_t offloaded_bytes = 0;  ///< bytes of its copies to the host
  std::int64_t reloaded_bytes = 0;   ///< bytes of its copies to the device
};

/// One reason for tensors that always stay on the device: those that eager scopes saved in one step, and graphed calls in their captures.
struct ExclusionReport {
  std::string reason;        ///< in words
  std::int64_t tensors = 0;  ///< how many were saved
  std::int64_t bytes = 0;    ///< bytes of their storages, counted for each tensor
};

/// What made the host wait in steps, with Options::find_syncs: one operator or driver call at one place.
struct SyncFinding {
  std::string kind;  ///< "value read on the host", "copy of pageable host memory", ...
  std::string
      operation;  ///< the operator ("aten::nonzero"), or the driver call outside of operators ("cudaStreamSynchronize")
  std::string call;                ///< the graphed call that ran eagerly, in forward or backward; empty: between calls
  std::string scope;               ///< the innermost scope or call; empty: none
  std::string node;                ///< the autograd node whose backward or hook waited; empty: not in a backward
  std::vector<std::string> stack;  ///< C++ frames, innermost first, without those of the library
  std::int64_t count = 0;          ///< how often, in all steps; an operator counts once each time it runs
  std::string remedy;              ///< what to use instead
};

/// What the engine did, as plain data. Sizes are bytes. "In a step" means in the latest complete step.
struct SIDESTREAM_API Report {
  std::int64_t steps = 0;            ///< complete steps
  std::int64_t offloaded_bytes = 0;  ///< offloaded in a step
  std::int64_t reloaded_bytes = 0;   ///< reloaded in a step
  std::int64_t saved_bytes = 0;      ///< distinct storages that autograd saved in the sizing pass
  /// By how much device memory grew in the forward of the sizing pass, less the tensors that autograd saved. The engine cannot offload it.
  std::int64_t unseen_bytes = 0;
  /// In a step: storages that were copied to the host again, because the program may have written them after the first copy.
  std::int64_t copied_twice_bytes = 0;
  /// In a step, and in all captures that exist: saved by groups that are offloaded, but not part of the plan.
  std::int64_t unplanned_bytes = 0;
  /// In a step, and in all captures that exist: not offloaded, because no pinned memory was free.
  std::int64_t refused_bytes = 0;
  std::int64_t pinned_bytes = 0;                       ///< page-locked host memory that is held
  std::int64_t pinned_requested_bytes = 0;             ///< requested bytes that found room, without rounding
  std::int64_t host_cap = 0;                           ///< the cap of Options::host_cap, or its default
  std::int64_t pinned_allocations_after_planning = 0;  ///< if it is not 0, the engine has a fault
  /// In a step: waits that were queued on a stream for the copies of one call or group. The wait for all copies at a step's end is not
  /// counted.
  std::int64_t waits = 0;
  std::int64_t inline_reloads = 0;  ///< in a step: groups that backward needed before their reload had begun
  std::int64_t captures =
      0;  ///< forward graphs and backward graphs captured so far, without those of delayed weight gradients
  /// Captures of calls that had one before, for whatever reason: relocated weights, new arguments, more microbatches
  /// in flight, another shape, a plan for Options::device_budget, ... Forward and backward count as one.
  std::int64_t recaptures = 0;
  std::int64_t replays = 0;  ///< graph launches in a step
  /// Calls in all steps that match `graph`, and calls of callables and buckets, that ran eagerly.
  /// The notes name the causes, except of plain callables, and of runs that come before a capture.
  std::int64_t eager_calls = 0;
  std::int64_t outputs_reused =
      0;  ///< in a step: output storages without a reference left, whose memory replays reused
  std::int64_t outputs_copied =
      0;  ///< in a step: output storages that were still referenced, so that their bytes were copied out
  std::int64_t outputs_copied_bytes = 0;  ///< bytes of these copies
  std::int64_t gradients_copied =
      0;  ///< in a step: gradients in a graph's memory that were still referenced and so copied out
  std::int64_t gradients_copied_bytes = 0;  ///< bytes of these copies
  std::int64_t unused_outputs = 0;  ///< in a step: outputs without a gradient, for which a backward graph used zeros
  std::int64_t external_bytes = 0;  ///< storages that captures read and that are not inputs, parameters or buffers
  /// Device memory that the living graphs took outside of LibTorch's allocator: their executables, and what libraries took in captures.
  ///
  /// It is the growth of the device's use during captures, so memory that other processes took then is included. No peak below includes
  /// it. The peaks do include what captures take inside the allocator: seed and offset of generators, and workspaces of matrix products.
  std::int64_t graph_bytes = 0;
  /// The same growth during the warm-ups: kernels and libraries are loaded then. Eager steps would load them too.
  std::int64_t warm_up_bytes = 0;
  /// A lower bound of the peak of MemoryUse::live that a step would have without offload.
  /// It is computed from live and offloaded bytes of the first step. From the second step on it includes what the first one left behind,
  /// beside gradients: most of all the state of the optimizer.
  std::int64_t sizing_peak_bytes = 0;
  std::int64_t first_step_peak_bytes = 0;  ///< peak of MemoryUse::live in the first step
  /// Peak of MemoryUse::live in the latest step, measured in that step or in an earlier step like it. A step is measured after each
  /// capture, and after the allocator saw another peak. If every step differs, fewer and fewer are measured, in the end one in 64.
  std::int64_t step_peak_bytes = 0;
  std::int64_t in_flight_bytes =
      0;  ///< offloaded bytes that were on the device at that peak, because their copies were under way
  std::int64_t device_budget = 0;        ///< Options::device_budget. Not set: this and the next four are 0
  std::int64_t forecast_peak_bytes = 0;  ///< peak of MemoryUse::live that the plan for it expects; 0 until it is made
  std::int64_t forecast_step_peak_bytes = 0;  ///< measured in a step under the plan; 0 until then
  double forecast_seconds = 0;                ///< of a step that the plan expects; 0 also if the device keeps no time
  double forecast_step_seconds = 0;           ///< measured in that step, from its begin to its end on the device
  /// The latest step that was traced, from 1: the second step after the latest captures, or one that Options::device_budget measures.
  /// 0: none yet. Only such steps have timing events. The next five are of this step; all but the last are 0 if the device keeps no time.
  std::int64_t traced_step = 0;
  double traced_seconds = 0;            ///< from its begin to its end on the device
  double waited_seconds = 0;            ///< how long compute waited for copies, the step's end included
  double offload_seconds = 0;           ///< how long all copies to the host ran
  double reload_seconds = 0;            ///< how long all copies to the device ran
  double tracing_seconds = 0;           ///< how long the host took to trace it
  std::int64_t verified_forwards = 0;   ///< replays compared with an eager run, in all steps (Options::verify_replays)
  std::int64_t verified_backwards = 0;  ///< the part of them whose gradients were compared too
  std::int64_t checked_operations = 0;  ///< operations in the journal (Options::check_steps)
  std::vector<std::string>
      order_findings;  ///< one line for each pair of accesses that nothing orders, and for each wait for an event that was never recorded
  std::int64_t syncs_found =
      0;  ///< in all steps: waits of the host, and allocations in steady steps (Options::find_syncs)
  std::int64_t syncs_unlisted = 0;          ///< the part of them that `syncs` leaves out: it lists a hundred places
  std::vector<SyncFinding> syncs;           ///< the most frequent first
  std::vector<ChunkReport> chunks;          ///< in a step: its chunks, in the order in which they began
  std::vector<GroupReport> groups;          ///< the groups of the plan
  std::vector<TimesReport> times;           ///< calls and groups in the step that was traced, as they came
  std::vector<ExclusionReport> exclusions;  ///< why tensors always stay on the device
  std::vector<std::string> notes;  ///< why storages stay, which groups are over the cap, why calls ran eagerly, ...

  /// R, gross: the drop of the peak of live device memory, from `sizing_peak_bytes` to `step_peak_bytes`,
  /// divided by `offloaded_bytes`. 0 if nothing was offloaded. It is a lower bound, as `sizing_peak_bytes` is.
  [[nodiscard]] double r_gross() const;
  /// R, net: the same drop divided by `offloaded_bytes` less `in_flight_bytes`. 0 if that difference is 0.
  [[nodiscard]] double r_net() const;
  /// Prints a table for people.
  void print(std::ostream& out) const;
  /// One JSON object, version 2, with the fields above by name.
  [[nodiscard]] std::string json() const;
};

}  // namespace sidestream
