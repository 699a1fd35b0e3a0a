#pragma once
#include <cstdint>
#include <vector>

#include <torch/arg.h>

#include "sidestream/call_options.h"
#include "sidestream/detail/export.h"
#include "sidestream/graph_options.h"
#include "sidestream/graphed_callable.h"

namespace sidestream {

/// What a bucketed callable does with inputs that fit no bucket. With `eager` each callable gives one warning. `capture` adds a bucket if
/// the inputs of the first callable fit none. In that pass, call each callable once, in order: they run eagerly. When the first callable is
/// called again and no backward is pending, all are captured with the inputs of that pass.
using OnUnknownShape = OnNewArguments;
/// What a bucketed callable does if a pending backward needs the memory: of another bucket, or of an earlier call of the same bucket.
enum class OnPendingBucket : std::uint8_t {
  eager,  ///< runs eagerly
  error,  ///< throws UsageError
};

/// How several shapes of callables are captured and replayed.
///
/// Each option is a chained setter; without an argument it gives the value.
struct BucketOptions {
  /// Options of each bucket's captures. If they name no pool, the buckets share a pool of their own.
  TORCH_ARG(GraphOptions, graph);
  /// For inputs that fit no bucket.
  TORCH_ARG(OnUnknownShape, on_unknown_shape) = OnUnknownShape::eager;
  /// Upper bound on the number of buckets with OnUnknownShape::capture, those of the samples included.
  TORCH_ARG(int64_t, max_buckets) = 8;
  /// For a shape that would need one bucket more. With `drop_least_used` the least recently used bucket is dropped. Its executables, pinned
  /// memory, static inputs and incoming gradients are freed. Later captures reuse its part of the pool. The pool is freed with the last
  /// bucket.
  TORCH_ARG(OnMaxCaptures, on_max_buckets) = OnMaxCaptures::drop_least_used;
  /// For a call while a pending backward needs the memory.
  TORCH_ARG(OnPendingBucket, on_pending) = OnPendingBucket::eager;
};

/// Captures the callables once for each bucket of samples, the largest bucket first. The captures share device memory (see GraphPool).
///
/// `samples[b][i]` are the arguments of `callables[i]` in bucket b; the buckets may come in any order. Device memory is reserved for the
/// largest bucket, plus each bucket's static inputs and incoming gradients. Pinned memory is leased for the largest bucket.
///
/// A call of a returned callable replays the bucket whose shapes, dtypes and requires_grad its inputs fit exactly. Nothing is padded.
/// OnUnknownShape says what happens to inputs that fit no bucket, OnPendingBucket what happens while a backward is pending. If modules are
/// in another mode than at the capture, the call runs eagerly, whatever its inputs. With OnUnknownShape::capture a call may capture first,
/// and then waits for the device. If that capture fails, the call throws CaptureError, and nothing of the capture is left.
/// `GraphedCallable::reset` drops the graphs of a callable in all buckets. All else is as GraphedCallable says.
///
/// Ordering, Capture: as make_graphed_callables.  Throws: what make_graphed_callables throws. UsageError without a bucket, and with
/// OnUnknownShape::capture if `max_buckets` is less than the number of buckets in `samples`. After an error no capture is left.
[[nodiscard]] SIDESTREAM_API std::vector<GraphedCallable> make_bucketed_callables(
    OffloadEngine& engine, const std::vector<Callable>& callables,
    const std::vector<std::vector<std::vector<Sample>>>& samples, const BucketOptions& options = {});

}  // namespace sidestream
