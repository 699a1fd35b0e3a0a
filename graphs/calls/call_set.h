#pragma once
#include <cstddef>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "graphs/calls/call_site.h"
#include "graphs/calls/callable_order.h"
#include "graphs/calls/recorded_calls.h"
#include "sidestream/graph_options.h"

namespace sidestream {

/// Callables that are captured together. Bucketed callables are captured once for each bucket of shapes: all of them have the same buckets,
/// in the same order. Other callables have one bucket.
///
/// The inputs of the first callable decide which bucket a pass over the callables uses. If they fit none, the pass is recorded: each
/// callable runs eagerly once, in order. Then the pass may become a bucket.
/// Threads: the step's.
class CallSet {
 public:
  /// Of so many `callables`. `recorded`: empty.
  CallSet(std::size_t callables, GraphOptions of_captures, RecordedCalls recorded)
      : sites(callables), options(std::move(of_captures)), pass(std::move(recorded)) {}
  CallSet(const CallSet&) = delete;
  CallSet& operator=(const CallSet&) = delete;
  ~CallSet() = default;

  /// The calls of `bucket` are those of the callables, in order, or the runs of `order`. `shape`: see CallVariant.
  void add(const std::shared_ptr<SequenceHolder>& bucket, const std::vector<std::size_t>& shape = {});
  [[nodiscard]] bool is_first(const CallSite& site) const noexcept { return &site == &sites.front(); }
  /// True if all callables were recorded.
  [[nodiscard]] bool is_complete() const noexcept { return pass.calls().size() == sites.size(); }
  /// True if the pass is recorded and `site` is the next callable.
  [[nodiscard]] bool awaits(const CallSite& site) const noexcept {
    return !pass.empty() && !is_complete() && &site == &sites[pass.calls().size()];
  }
  /// What is captured of a complete pass, which is forgotten.
  [[nodiscard]] std::vector<CallSpec> take_specs();
  /// True while a bucket, or another capture in the same memory, awaits a backward.
  [[nodiscard]] bool is_pending() const;
  /// True while modules of a callable have other flags than at the capture.
  [[nodiscard]] bool is_in_other_mode() const;

  std::deque<CallSite> sites;
  GraphOptions options;                  ///< of each capture
  std::unique_ptr<CallableOrder> order;  ///< null: they are captured as one nest
  RecordedCalls pass;
  bool first_replays = false;  ///< the latest call of the first callable did

 private:
  /// Also if it was dropped: it knows the modes and the links of all buckets.
  std::shared_ptr<SequenceHolder> first_bucket_;
};

}  // namespace sidestream
