#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <c10/util/ArrayRef.h>
#include <torch/arg.h>

#include "sidestream/call_options.h"
#include "sidestream/detail/export.h"
#include "sidestream/graph_options.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/named_input.h"
#include "sidestream/replay_options.h"

namespace sidestream {

/// Inputs fit no bucket: an eager run with one warning a callable, a UsageError, or a bucket more. Then the inputs of the first callable
/// decide: where they fit none, all run eagerly in that pass, each once and in order, and are captured with what they were given
/// as soon as the first of them is called again and no backward is pending.
enum class OnUnknownShape : std::uint8_t { eager, error, capture };
/// A backward is pending that needs the memory, of another bucket or of an earlier call like this one: an eager run, or a UsageError.
enum class OnPendingBucket : std::uint8_t { eager, error };

/// How several shapes of callables are captured and replayed.
struct BucketOptions {
  /// Of each bucket's captures. Where they name no pool, the buckets get one of their own.
  TORCH_ARG(GraphOptions, graph);
  TORCH_ARG(OnUnknownShape, on_unknown_shape) = OnUnknownShape::eager;
  /// How many buckets OnUnknownShape::capture leads to, those of the samples among them.
  TORCH_ARG(int64_t, max_buckets) = 8;
  /// What becomes of a shape that would need one more: the bucket that was used least recently makes room for it, it runs eagerly with one
  /// warning, or a UsageError. What is dropped gives back its executables, its pinned memory, inputs and seeds; its part of the pool
  /// goes to later captures, and back to the device with the last of the buckets.
  TORCH_ARG(OnMaxCaptures, on_max_buckets) = OnMaxCaptures::drop_least_used;
  TORCH_ARG(OnPendingBucket, on_pending) = OnPendingBucket::eager;
};

/// A callable captured for several shapes, which share device memory (see GraphPool); copies share the captures.
///
/// A call replays the bucket that its inputs fit exactly: shapes, dtypes and requires_grad; it pads nothing. While a backward of another
/// bucket is pending, or of the same one's earlier call, it runs eagerly, or is refused. With modules in another mode than at the
/// capture it runs eagerly, whatever its inputs. With OnUnknownShape::capture a call may capture first, which waits for the device; a CaptureError comes out of that call, and
/// nothing is left of the capture. Else as GraphedCallable.
/// Threads: one at a time; backward may run on autograd's device thread.
class SIDESTREAM_API BucketedCallable {
 public:
  Tensors operator()(const Tensors& inputs) const;
  /// The same on a stream, or with an event, of the caller's: for whichever bucket replays.
  Tensors operator()(const Tensors& inputs, const ReplayOptions& options) const;
  /// The same, with the arguments by the names of Callable::input_names, as GraphedCallable::call.
  Tensors call(c10::ArrayRef<NamedInput> inputs) const;
  Tensors call(c10::ArrayRef<NamedInput> inputs, const ReplayOptions& options) const;
  [[nodiscard]] const std::string& name() const;
  /// Drops the graphs of all buckets; idempotent. Later replays throw UsageError. Pinned memory and executables come back, device memory
  /// when the callables and the pool are gone.
  void reset();

 private:
  friend class EngineAccess;
  class Shared;
  explicit BucketedCallable(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}
  [[nodiscard]] Shared& shared() const;
  std::shared_ptr<Shared> shared_;  ///< by copies
};

/// Captures the callables once for each bucket of samples, the largest first. `samples[b][i]` are the arguments of `callables[i]` in
/// bucket b, in any order. Device memory is reserved for the largest bucket, plus each bucket's own inputs and the gradients that its
/// backward begins from; pinned memory is leased for the largest.
/// Ordering, Capture: as make_graphed_callables.  Throws: what it throws; UsageError without a bucket, and, with OnUnknownShape::capture,
/// where `max_buckets` is below the number of buckets in `samples`. Nothing is left of it then.
[[nodiscard]] SIDESTREAM_API std::vector<BucketedCallable> make_bucketed_callables(
    OffloadEngine& engine, const std::vector<Callable>& callables,
    const std::vector<std::vector<std::vector<Sample>>>& samples, const BucketOptions& options = {});

}  // namespace sidestream
