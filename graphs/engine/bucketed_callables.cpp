#include "sidestream/bucketed_callables.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include "graphs/engine/engine_access.h"
#include "sidestream/error.h"
#include "sidestream/graph_pool.h"

namespace sidestream {
namespace {

/// Of the samples that are tensors.
std::size_t bytes_of(const std::vector<std::vector<Sample>>& bucket) {
  std::size_t bytes = 0;
  for (const std::vector<Sample>& samples : bucket) {
    for (const Sample& sample : samples) {
      bytes += sample.tensor().defined() ? sample.tensor().nbytes() : 0;
    }
  }
  return bytes;
}

}  // namespace

/// What copies of a BucketedCallable share.
class BucketedCallable::Buckets {
 public:
  explicit Buckets(const BucketOptions& options)
      : on_unknown_shape_(options.on_unknown_shape()), on_pending_(options.on_pending()) {}

  void add(GraphedCallable bucket) { buckets_.push_back(std::move(bucket)); }
  [[nodiscard]] const GraphedCallable& first() const { return buckets_.front(); }

  Tensors run(const Tensors& inputs) {
    if (dropped_ || !at::GradMode::is_enabled()) {
      return first()(inputs);  // refused, or eagerly
    }
    for (const GraphedCallable& bucket : buckets_) {
      if (!EngineAccess::fits(bucket, inputs)) {
        continue;
      }
      if (on_pending_ == OnPendingBucket::eager && EngineAccess::has_to_wait(bucket)) {
        return EngineAccess::run_eagerly(bucket, inputs);
      }
      return bucket(inputs);
    }
    // An input that is linked to an output fits where that output was replayed only.
    if (EngineAccess::is_in_other_mode(first())) {
      return EngineAccess::run_eagerly(first(), inputs);
    }
    if (on_pending_ == OnPendingBucket::eager &&
        std::any_of(buckets_.begin(), buckets_.end(), &EngineAccess::has_to_wait)) {
      return EngineAccess::run_eagerly(first(), inputs);
    }
    if (on_unknown_shape_ == OnUnknownShape::error) {
      throw UsageError("bucketed call \"" + first().name() + "\": its inputs fit none of the " +
                       std::to_string(buckets_.size()) +
                       " buckets (shapes, dtypes, requires_grad); pass what was captured, add a bucket, or set "
                       "BucketOptions::on_unknown_shape to eager");
    }
    if (!std::exchange(warned_, true)) {
      TORCH_WARN("Sidestream: bucketed call \"", first().name(), "\" runs eagerly: its inputs fit none of the ",
                 buckets_.size(), " buckets");
    }
    return EngineAccess::run_eagerly(first(), inputs);
  }
  void reset() {
    for (GraphedCallable& bucket : buckets_) {
      bucket.reset();
    }
    dropped_ = true;
  }

 private:
  OnUnknownShape on_unknown_shape_;
  OnPendingBucket on_pending_;
  std::vector<GraphedCallable> buckets_;  ///< the largest first
  bool warned_ = false;
  bool dropped_ = false;
};

/// Makes them.
class BucketCapture {
 public:
  static std::vector<BucketedCallable> capture(OffloadEngine& engine, const std::vector<Callable>& callables,
                                               const std::vector<std::vector<std::vector<Sample>>>& samples,
                                               const BucketOptions& options) {
    std::vector<std::size_t> order(samples.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return bytes_of(samples[a]) > bytes_of(samples[b]); });
    GraphOptions graph = options.graph();
    if (graph.pool() == nullptr) {
      graph.pool(std::make_shared<GraphPool>(EngineAccess::state(engine).runtime().device()));
    }
    std::vector<std::shared_ptr<BucketedCallable::Buckets>> buckets;
    for (const std::size_t b : order) {
      std::vector<GraphedCallable> graphed = make_graphed_callables(engine, callables, samples[b], graph);
      for (std::size_t i = 0; i < graphed.size(); ++i) {
        if (buckets.size() == i) {
          buckets.push_back(std::make_shared<BucketedCallable::Buckets>(options));
        }
        buckets[i]->add(std::move(graphed[i]));
      }
    }
    std::vector<BucketedCallable> result;
    for (auto& made : buckets) {
      result.push_back(BucketedCallable(std::move(made)));
    }
    return result;
  }
};

BucketedCallable::Buckets& BucketedCallable::buckets() const {
  if (buckets_ == nullptr) {
    throw UsageError("this BucketedCallable was moved from; use the one that it was moved to");
  }
  return *buckets_;
}

Tensors BucketedCallable::operator()(const Tensors& inputs) const { return buckets().run(inputs); }

const std::string& BucketedCallable::name() const { return buckets().first().name(); }

void BucketedCallable::reset() { buckets().reset(); }

std::vector<BucketedCallable> make_bucketed_callables(OffloadEngine& engine, const std::vector<Callable>& callables,
                                                      const std::vector<std::vector<std::vector<Sample>>>& samples,
                                                      const BucketOptions& options) {
  if (samples.empty()) {
    throw UsageError("make_bucketed_callables: no bucket of samples; give at least one");
  }
  return BucketCapture::capture(engine, callables, samples, options);
}

}  // namespace sidestream
