#pragma once
#include <cstddef>
#include <deque>
#include <memory>
#include <vector>

#include "graphs/calls/call_site.h"
#include "graphs/calls/recorded_calls.h"
#include "sidestream/graph_options.h"
#include "sidestream/graphed_callable.h"

namespace sidestream {

/// Callables that are captured together. Bucketed callables are captured once for each bucket of shapes: all of them have the same buckets,
/// in the same order. Other callables have one bucket.
///
/// The inputs of the first callable decide which bucket a pass over the callables uses. If they fit none, the pass is recorded: each
/// callable runs eagerly once, in order. Then the pass may become a bucket.
/// Threads: the step's.
class CallSet {
 public:
  /// Of so many `callables`. `samples`: of the first bucket. `pass`: empty.
  CallSet(std::size_t callables, GraphOptions options, const std::vector<std::vector<Sample>>& samples,
          RecordedCalls pass);
  CallSet(const CallSet&) = delete;
  CallSet& operator=(const CallSet&) = delete;
  ~CallSet() = default;

  /// Before a call of `site`: a pass that was recorded in part is forgotten if another pass begins.
  void call_begins(const CallSite& site);
  /// True if the pass is recorded and `site` is the next callable.
  [[nodiscard]] bool awaits(const CallSite& site) const noexcept;
  /// True if `site` is the first callable, and no recorded pass waits for its capture.
  [[nodiscard]] bool may_begin(const CallSite& site) const noexcept { return is_first(site) && pass.empty(); }
  /// True if all callables were recorded, and a bucket may be captured now in the modes of that pass.
  [[nodiscard]] bool may_capture(const CallModes& modes) const;
  /// What is captured for that pass. It is forgotten.
  [[nodiscard]] std::vector<CallSpec> take_specs(c10::Device device);
  /// True while a bucket, or another capture in the same memory, awaits a backward.
  [[nodiscard]] bool is_pending() const;
  /// True while modules of a callable have other flags than at the capture.
  [[nodiscard]] bool is_in_other_mode() const;
  [[nodiscard]] bool is_first(const CallSite& site) const noexcept { return &site == &sites.front(); }

  std::deque<CallSite> sites;
  GraphOptions options;  ///< of each capture
  std::shared_ptr<SequenceHolder>
      first;  ///< the first bucket, also if it was dropped: it knows the modes of the captures
  RecordedCalls pass;
  bool first_replays = false;  ///< the latest call of the first callable did

 private:
  [[nodiscard]] bool is_complete() const noexcept { return pass.calls().size() == sites.size(); }

  std::vector<std::vector<bool>>
      linked_;  ///< by callable and argument: the sample was the output of an earlier callable
};

}  // namespace sidestream
