#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torch/arg.h>

#include "sidestream/export.h"
#include "sidestream/graph_options.h"
#include "sidestream/graphed_callable.h"

namespace sidestream {

/// Inputs fit no bucket: an eager run with one warning a callable, or a UsageError.
enum class OnUnknownShape : std::uint8_t { eager, error };
/// A backward of another bucket is pending: an eager run, or a UsageError.
enum class OnPendingBucket : std::uint8_t { eager, error };

/// How several shapes of callables are captured and replayed.
struct BucketOptions {
  /// Of each bucket's captures. Where they name no pool, the buckets get one of their own.
  TORCH_ARG(GraphOptions, graph);
  TORCH_ARG(OnUnknownShape, on_unknown_shape) = OnUnknownShape::eager;
  TORCH_ARG(OnPendingBucket, on_pending) = OnPendingBucket::eager;
};

/// A callable captured for several shapes, which share device memory (see GraphPool); copies share the captures.
///
/// A call replays the bucket that its inputs fit exactly: shapes, dtypes and requires_grad; it pads nothing. While a backward of another
/// bucket is pending it runs eagerly, or is refused. With modules in another mode than at the capture it runs eagerly, whatever its inputs.
/// Else as GraphedCallable.
/// Threads: one at a time; backward may run on autograd's device thread.
class SIDESTREAM_API BucketedCallable {
 public:
  Tensors operator()(const Tensors& inputs) const;
  [[nodiscard]] const std::string& name() const;
  /// Drops the graphs of all buckets; idempotent. Later replays throw UsageError. Pinned memory and executables come back, device memory
  /// when the callables and the pool are gone.
  void reset();

 private:
  friend class BucketCapture;
  class Buckets;
  explicit BucketedCallable(std::shared_ptr<Buckets> buckets) : buckets_(std::move(buckets)) {}
  [[nodiscard]] Buckets& buckets() const;
  std::shared_ptr<Buckets> buckets_;
};

/// Captures the callables once for each bucket of samples, the largest first. `samples[b][i]` are the arguments of `callables[i]` in
/// bucket b, in any order. Device memory is reserved for the largest bucket, plus each bucket's own inputs and the gradients that its
/// backward begins from; pinned memory is leased for the largest.
/// Ordering, Capture: as make_graphed_callables.  Throws: what it throws; UsageError without a bucket. Nothing is left of it then.
[[nodiscard]] SIDESTREAM_API std::vector<BucketedCallable> make_bucketed_callables(
    OffloadEngine& engine, const std::vector<Callable>& callables,
    const std::vector<std::vector<std::vector<Sample>>>& samples, const BucketOptions& options = {});

}  // namespace sidestream
