#include "sidestream/bucketed_callables.h"

#include <utility>

#include "graphs/engine/engine_access.h"
#include "graphs/entry/bucket_set.h"
#include "sidestream/error.h"

namespace sidestream {

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
