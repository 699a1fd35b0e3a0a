#include "graphs/entry/bucket_set.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include "graphs/engine/engine_access.h"
#include "observe/sync_finder.h"
#include "sidestream/bucketed_callables.h"
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

void check(const BucketOptions& options, std::size_t buckets) {
  if (buckets == 0) {
    throw UsageError("make_bucketed_callables: no samples were given; pass at least one bucket of samples");
  }
  if (options.on_unknown_shape() != OnUnknownShape::capture) {
    return;
  }
  if (options.max_buckets() < static_cast<std::int64_t>(buckets)) {
    throw UsageError("make_bucketed_callables: BucketOptions::max_buckets is " + std::to_string(options.max_buckets()) +
                     ", but there are " + std::to_string(buckets) +
                     " buckets of samples; raise it, or pass fewer buckets");
  }
}

}  // namespace

BucketSet::BucketSet(const OffloadEngine& engine, std::vector<Callable> callables,
                     const std::vector<std::vector<std::vector<Sample>>>& samples, const BucketOptions& options)
    : engine_(EngineAccess::handle(engine)),
      callables_(std::move(callables)),
      options_(options),
      gradients_(!options.graph().forward_only()),
      dropped_(callables_.size()),
      warned_(callables_.size()),
      pass_(EngineAccess::state(engine).runtime().device()) {
  check(options, samples.size());
  GraphOptions graph = options.graph();
  if (graph.pool() == nullptr) {
    graph.pool(std::make_shared<GraphPool>(EngineAccess::state(engine).runtime().device()));
  }
  options_.graph(std::move(graph));
  std::vector<std::size_t> order(samples.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return bytes_of(samples[a]) > bytes_of(samples[b]); });
  for (const std::size_t b : order) {
    capture(samples[b], options_.graph());
  }
  if (options_.on_unknown_shape() == OnUnknownShape::capture) {
    std::vector<std::vector<Sample>> links = samples.front();
    for (std::vector<Sample>& of_callable : links) {
      for (Sample& sample : of_callable) {
        sample = sample.callable() < 0 ? Sample(at::Tensor()) : sample;  // keeps no tensor
      }
    }
    pass_.expect(std::move(links));
  }
}

void BucketSet::capture(const std::vector<std::vector<Sample>>& samples, const GraphOptions& options) {
  Bucket bucket{EngineAccess::capture(engine_, callables_, samples, options), ++clock_};
  if (first_.empty()) {
    first_ = bucket.callables;
  }
  buckets_.push_back(std::move(bucket));
}

void BucketSet::capture_pass() {
  // What is pending needs the memory, and a capture would freeze modes that are not the pass's.
  if (is_pending() || is_in_other_mode() || !(modes() == modes_)) {
    return;
  }
  GraphOptions options = options_.graph();
  if (const auto agree = options.agree_to_capture(); agree && !agree(/*mine=*/true)) {
    return;
  }
  options.agree_to_capture(std::function<bool(bool)>());
  const SyncFinder::Pause copies_samples;
  const std::vector<std::vector<Sample>> samples = pass_.take();
  if (static_cast<std::int64_t>(buckets_.size()) >= options_.max_buckets()) {
    drop_least_used();
  }
  capture(samples, options);
}

void BucketSet::drop_least_used() {
  const auto least = std::min_element(buckets_.begin(), buckets_.end(),
                                      [](const Bucket& a, const Bucket& b) { return a.used_at < b.used_at; });
  for (GraphedCallable& callable : least->callables) {
    callable.reset();
  }
  buckets_.erase(least);
  EngineAccess::state(engine_).counts().bucket_dropped(name(0), options_.max_buckets());
}

BucketSet::Bucket* BucketSet::fitting(std::size_t index, const Tensors& inputs) {
  const auto found = std::find_if(buckets_.begin(), buckets_.end(), [&](const Bucket& bucket) {
    return EngineAccess::fits(bucket.callables[index], inputs);
  });
  return found == buckets_.end() ? nullptr : &*found;
}

bool BucketSet::is_pending() const {
  return std::any_of(buckets_.begin(), buckets_.end(),
                     [](const Bucket& bucket) { return EngineAccess::memory_is_pending(bucket.callables.front()); });
}

bool BucketSet::is_in_other_mode() const {
  return std::any_of(first_.begin(), first_.end(), &EngineAccess::is_in_other_mode);
}

CallModes BucketSet::modes() const {
  return CallModes::current(EngineAccess::state(engine_).runtime().device().type());
}

Tensors BucketSet::in_order(std::size_t index, c10::ArrayRef<NamedInput> inputs) const {
  return EngineAccess::in_order(first_[index], inputs);
}

Tensors BucketSet::run(std::size_t index, const Tensors& inputs, const ReplayOptions* options) {
  if (dropped_[index] || at::GradMode::is_enabled() != gradients_ || c10::InferenceMode::is_enabled()) {
    return EngineAccess::run(first_[index], inputs, options);  // refused, or eagerly
  }
  if (index == 0 && pass_.complete()) {
    capture_pass();
  }
  Bucket* const bucket = fitting(index, inputs);
  const bool beside_pending = bucket != nullptr && options_.on_pending() == OnPendingBucket::eager &&
                              EngineAccess::has_to_wait(bucket->callables[index]);
  const bool replays = bucket != nullptr && !beside_pending;
  first_replays_ = index == 0 ? replays : first_replays_;
  const bool noted = options_.on_unknown_shape() == OnUnknownShape::capture && note(index, inputs);
  if (bucket == nullptr && !noted) {
    check_unknown(index);
  }
  if (replays) {
    bucket->used_at = ++clock_;
  } else {
    EngineAccess::state(engine_).counts().bucketed_call_ran(name(index), cause_of_eager_run(bucket != nullptr));
  }
  Tensors outputs = replays ? EngineAccess::run(bucket->callables[index], inputs, options)
                            : EngineAccess::run_eagerly(first_[index], inputs, options);
  if (noted) {
    pass_.gave(outputs);
  }
  return outputs;
}

EagerCause BucketSet::cause_of_eager_run(bool fits) const {
  // A linked input fits no bucket either if the call before it ran eagerly, so that call's cause comes first.
  if (is_in_other_mode()) {
    return EagerCause::other_mode;
  }
  return fits || is_pending() ? EagerCause::shared_memory : EagerCause::no_bucket;
}

bool BucketSet::note(std::size_t index, const Tensors& inputs) {
  if (index == 0 && !pass_.complete()) {
    pass_.stop();
    if (!first_replays_ && !is_in_other_mode() && !is_pending() && has_room(index)) {
      pass_.begin();
      modes_ = modes();
    }
  }
  if (!pass_.awaits(index)) {
    return false;
  }
  const SyncFinder::Pause keeps_copies;  // on the host
  pass_.note(inputs);
  return true;
}

bool BucketSet::has_room(std::size_t index) {
  if (options_.on_max_buckets() == OnMaxCaptures::drop_least_used ||
      static_cast<std::int64_t>(buckets_.size()) < options_.max_buckets()) {
    return true;
  }
  const std::string what = "bucketed call \"" + name(index) + "\"";
  if (options_.on_max_buckets() == OnMaxCaptures::error) {
    throw UsageError(what + ": its inputs fit none of the " + std::to_string(buckets_.size()) +
                     " buckets, and BucketOptions::max_buckets allows no more; raise it, pass fewer shapes, or set "
                     "BucketOptions::on_max_buckets to eager or drop_least_used");
  }
  if (!std::exchange(warned_of_bound_, true)) {
    TORCH_WARN("Sidestream: ", what, " runs eagerly: its inputs fit none of the ", buckets_.size(),
               " buckets, and BucketOptions::max_buckets allows no more");
  }
  return false;
}

void BucketSet::check_unknown(std::size_t index) {
  if (EngineAccess::is_in_other_mode(first_[index])) {
    return;
  }
  if (options_.on_unknown_shape() == OnUnknownShape::capture) {
    if (index > 0 && first_replays_) {
      warn(index,
           ", although those of the first callable fit one. The first callable decides which bucket a pass uses");
    }
    return;
  }
  // An input that is linked to an output fits where that output was replayed only.
  if (options_.on_pending() == OnPendingBucket::eager && is_pending()) {
    return;
  }
  if (options_.on_unknown_shape() == OnUnknownShape::error) {
    throw UsageError("bucketed call \"" + name(index) + "\": its inputs fit none of the " +
                     std::to_string(buckets_.size()) +
                     " buckets (shapes, dtypes, requires_grad); pass inputs as captured, add a bucket, or set "
                     "BucketOptions::on_unknown_shape to eager or capture");
  }
  warn(index, "");
}

void BucketSet::warn(std::size_t index, const char* why) {
  if (!warned_[index]) {
    warned_[index] = true;
    TORCH_WARN("Sidestream: bucketed call \"", name(index), "\" runs eagerly: its inputs fit none of the ",
               buckets_.size(), " buckets", why);
  }
}

void BucketSet::reset(std::size_t index) {
  for (Bucket& bucket : buckets_) {
    bucket.callables[index].reset();
  }
  first_[index].reset();
  dropped_[index] = true;
  pass_.stop();
}

/// What copies of a BucketedCallable share.
class BucketedCallable::Shared {
 public:
  Shared(std::shared_ptr<BucketSet> set, std::size_t index) noexcept : set_(std::move(set)), index_(index) {}

  Tensors run(const Tensors& inputs, const ReplayOptions* options = nullptr) {
    return set_->run(index_, inputs, options);
  }
  [[nodiscard]] Tensors in_order(c10::ArrayRef<NamedInput> inputs) const { return set_->in_order(index_, inputs); }
  [[nodiscard]] const std::string& name() const { return set_->name(index_); }
  void reset() { set_->reset(index_); }

 private:
  std::shared_ptr<BucketSet> set_;  ///< by the callables that were captured together
  std::size_t index_;
};

BucketedCallable::Shared& BucketedCallable::shared() const {
  if (shared_ == nullptr) {
    throw UsageError("this BucketedCallable was moved from; use the one that it was moved to");
  }
  return *shared_;
}

Tensors BucketedCallable::operator()(const Tensors& inputs) const { return shared().run(inputs); }

Tensors BucketedCallable::operator()(const Tensors& inputs, const ReplayOptions& options) const {
  return shared().run(inputs, &options);
}

Tensors BucketedCallable::call(c10::ArrayRef<NamedInput> inputs) const {
  return shared().run(shared().in_order(inputs));
}

Tensors BucketedCallable::call(c10::ArrayRef<NamedInput> inputs, const ReplayOptions& options) const {
  return shared().run(shared().in_order(inputs), &options);
}

const std::string& BucketedCallable::name() const { return shared().name(); }

void BucketedCallable::reset() { shared().reset(); }

std::vector<BucketedCallable> EngineAccess::bucketed(std::shared_ptr<BucketSet> set) {
  std::vector<BucketedCallable> callables;
  for (std::size_t i = 0; i < set->callables(); ++i) {
    callables.push_back(BucketedCallable(std::make_shared<BucketedCallable::Shared>(set, i)));
  }
  return callables;
}

std::vector<BucketedCallable> make_bucketed_callables(OffloadEngine& engine, const std::vector<Callable>& callables,
                                                      const std::vector<std::vector<std::vector<Sample>>>& samples,
                                                      const BucketOptions& options) {
  return EngineAccess::bucketed(std::make_shared<BucketSet>(engine, callables, samples, options));
}

}  // namespace sidestream
