#pragma once
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

#include "sidestream/detail/export.h"

namespace sidestream {

/// One group of the plan.
struct GroupReport {
  std::string name;                  ///< "blocks.3.core_attn"
  std::int64_t bytes = 0;            ///< of the storages it saves first, each storage once
  std::int64_t offloaded_bytes = 0;  ///< of those that leave the device
  std::string kept_because;          ///< why the rest stays; empty when all of it is offloaded
};

/// One reason for tensors that always stay on the device.
struct ExclusionReport {
  std::string reason;
  std::int64_t tensors = 0;
  std::int64_t bytes = 0;
};

/// What made the host wait in steps, with Options::find_syncs: one operator or call of the driver at one place.
struct SyncFinding {
  std::string kind;  ///< "value read on the host", "copy of pageable host memory", ...
  std::string
      operation;      ///< the operator ("aten::nonzero"), or what was called outside of any ("cudaStreamSynchronize")
  std::string call;   ///< the graphed call that ran eagerly, or whose backward ran so; empty: between calls
  std::string scope;  ///< the innermost scope or call; empty: none
  std::string node;   ///< the autograd node whose backward, or whose hook, it was; empty: no backward
  std::vector<std::string> stack;  ///< C++ frames, innermost first; the library's own are left out
  std::int64_t count = 0;          ///< in all steps; an operator counts once each time it runs
  std::string remedy;              ///< what to use instead
};

/// What the engine did; plain data. Bytes unless said otherwise; "a step" is the latest whole one.
struct SIDESTREAM_API Report {
  std::int64_t steps = 0;
  std::int64_t offloaded_bytes = 0;  ///< left the device in a step
  std::int64_t reloaded_bytes = 0;   ///< came back in a step
  std::int64_t saved_bytes = 0;      ///< distinct storages that autograd saved in the sizing pass
  std::int64_t unseen_bytes = 0;     ///< grew on the device during the sizing pass's forward and passed no hook
  std::int64_t copied_twice_bytes =
      0;                             ///< of storages that had to be copied again because they were written in between
  std::int64_t unplanned_bytes = 0;  ///< a step: of groups that leave, saved without a place in the plan
  std::int64_t refused_bytes = 0;    ///< a step: was to leave and stayed, since no pinned memory was free
  std::int64_t pinned_bytes = 0;     ///< page-locked host memory held
  std::int64_t pinned_requested_bytes = 0;  ///< exact sum of the sizes asked for
  std::int64_t host_cap = 0;
  std::int64_t pinned_allocations_after_planning = 0;  ///< must be 0
  std::int64_t waits = 0;                              ///< a step: times a stream was made to wait for a copy
  std::int64_t inline_reloads = 0;  ///< a step: groups that backward needed before their prefetch was begun
  std::int64_t captures = 0;        ///< graphs captured so far, forward and backward counted together
  std::int64_t recaptures = 0;      ///< of those, because weights were relocated or arguments changed
  std::int64_t replays = 0;         ///< graph launches in a step
  std::int64_t eager_calls = 0;     ///< calls in all steps that match `graph` and ran eagerly
  std::int64_t outputs_reused = 0;  ///< a step: storages of outputs that replays gave out again, as nobody held them
  std::int64_t outputs_copied = 0;  ///< a step: those that somebody held, so that their bytes were copied out first
  std::int64_t outputs_copied_bytes = 0;
  std::int64_t gradients_copied =
      0;  ///< a step: held gradients of parameters and inputs that lay in a graph's own memory, likewise
  std::int64_t gradients_copied_bytes = 0;
  std::int64_t unused_outputs = 0;  ///< a step: outputs without a gradient, for which a backward graph took zeros
  std::int64_t external_bytes = 0;  ///< storages that captures read and that are neither inputs, parameters nor buffers
  // Device memory that graphs took outside of LibTorch's allocator and pinned pools: by how much the device's use grew while they were
  // warmed up and captured, so what other processes took meanwhile is in it. Of the graphs that live; not in any peak below. What
  // captures take in the allocator is counted there: a generator's seed and offset as tensors, workspaces of products in the pools.
  std::int64_t graph_bytes = 0;    ///< executables of graphs, and what libraries took in captures
  std::int64_t warm_up_bytes = 0;  ///< before that: kernels and libraries that were loaded, as eager steps do too
  // Peaks of live device memory: MemoryUse::live.
  std::int64_t sizing_peak_bytes = 0;      ///< of the first step, had nothing left
  std::int64_t first_step_peak_bytes = 0;  ///< of the first step
  /// Of the latest step, as measured in it or in an earlier one like it: one is measured after each capture, and when the allocator
  /// saw another peak; where each step is another, one in 64 in the end.
  std::int64_t step_peak_bytes = 0;
  std::int64_t in_flight_bytes = 0;     ///< of the bytes offloaded: on the device at that peak, on their way
  std::int64_t verified_forwards = 0;   ///< replays compared with an eager run, in all steps (Options::verify_replays)
  std::int64_t verified_backwards = 0;  ///< of those, the ones whose gradients were compared as well
  std::int64_t checked_operations = 0;  ///< written into the journal, with Options::check_steps
  std::vector<std::string> order_findings;  ///< accesses that nothing orders, and waits for nothing, one line each
  std::int64_t syncs_found =
      0;  ///< waits of the host in all steps, and allocations in steady ones (Options::find_syncs)
  std::int64_t syncs_unlisted = 0;  ///< of those, at places beyond the hundred that are listed
  std::vector<SyncFinding> syncs;   ///< the most frequent first
  std::vector<GroupReport> groups;
  std::vector<ExclusionReport> exclusions;
  std::vector<std::string> notes;  ///< storages that a kept group holds back, groups over the cap, ...

  /// R: drop of the peak of live device memory, from `sizing_peak_bytes` to `step_peak_bytes`, over the bytes offloaded (gross), or
  /// over those of them that were not in flight at the peak (net). 0 when there were none.
  [[nodiscard]] double r_gross() const;
  [[nodiscard]] double r_net() const;
  /// A table for people.
  void print(std::ostream& out) const;
  /// One JSON object, version 2: the fields above by name.
  [[nodiscard]] std::string json() const;
};

}  // namespace sidestream
