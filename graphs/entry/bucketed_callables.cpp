#include "sidestream/bucketed_callables.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "graphs/calls/call_site.h"
#include "graphs/engine/engine_access.h"
#include "graphs/guards/input_facts.h"
#include "sidestream/error.h"
#include "sidestream/graph_pool.h"

namespace sidestream {
namespace {

/// Of the samples that are tensors.
std::size_t bytes_of(const EngineAccess::Samples& bucket) {
  std::size_t bytes = 0;
  for (const std::vector<Sample>& samples : bucket) {
    for (const Sample& sample : samples) {
      const bool plain =
          sample.tensor().defined() && !is_sparse_or_nested(sample.tensor());  // others are refused later
      bytes += plain ? sample.tensor().nbytes() : 0;
    }
  }
  return bytes;
}

}  // namespace

std::vector<GraphedCallable> make_bucketed_callables(OffloadEngine& engine, const std::vector<Callable>& callables,
                                                     const std::vector<std::vector<std::vector<Sample>>>& samples,
                                                     const BucketOptions& options) {
  if (samples.empty()) {
    throw UsageError("make_bucketed_callables: no samples were given; pass at least one bucket of samples");
  }
  if (options.on_unknown_shape() == OnUnknownShape::capture &&
      options.max_buckets() < static_cast<std::int64_t>(samples.size())) {
    throw UsageError("make_bucketed_callables: BucketOptions::max_buckets is " + std::to_string(options.max_buckets()) +
                     ", but there are " + std::to_string(samples.size()) +
                     " buckets of samples; raise it, or pass fewer buckets");
  }
  GraphOptions graph = options.graph();
  if (!graph.order().empty()) {
    throw UsageError(
        "make_bucketed_callables: GraphOptions::order works only with make_graphed_callables. For each shape make "
        "callables in order");
  }
  if (graph.pool() == nullptr) {
    graph.pool(std::make_shared<GraphPool>(EngineAccess::state(engine).runtime().device()));
  }
  std::vector<EngineAccess::Samples> largest_first = samples;
  std::stable_sort(largest_first.begin(), largest_first.end(),
                   [](const auto& a, const auto& b) { return bytes_of(a) > bytes_of(b); });
  const CallRules rules = CallRules::of(options);
  return EngineAccess::capture(engine, callables, largest_first, graph, &rules);
}

}  // namespace sidestream
