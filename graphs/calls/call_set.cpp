#include "graphs/calls/call_set.h"

#include <algorithm>
#include <numeric>

#include <c10/util/irange.h>

namespace sidestream {

void CallSet::add(const std::shared_ptr<SequenceHolder>& bucket, const std::vector<std::size_t>& shape) {
  first_bucket_ = first_bucket_ == nullptr ? bucket : first_bucket_;
  if (order != nullptr) {
    for (const auto i : c10::irange(order->runs().size())) {
      const CallableOrder::Run& run = order->runs()[i];
      sites[run.callable].variants.add({bucket, i, {}, shape, {}, run.chunk, run.stage});
    }
    return;
  }
  for (const auto i : c10::irange(sites.size())) {
    sites[i].variants.add({bucket, i, {}, shape});
  }
}

std::vector<CallSpec> CallSet::take_specs() {
  std::vector<std::size_t> all(sites.size());
  std::iota(all.begin(), all.end(), 0);
  std::vector<CallSpec> specs = pass.specs_of(all, [&](std::size_t call, std::size_t input) {
    const std::vector<CallInput>& inputs = first_bucket_->captured().calls[first_bucket_->index_of(call)].spec.inputs;
    return input < inputs.size() && inputs[input].from;
  });
  pass.clear();
  return specs;
}

bool CallSet::is_pending() const {
  const std::vector<CallVariant>& buckets = sites.front().variants.all;
  return std::any_of(buckets.begin(), buckets.end(), [](const CallVariant& bucket) {
    return bucket.holder->sequence->pending().any() || bucket.holder->sequence->has_to_wait();
  });
}

bool CallSet::is_in_other_mode() const {
  for (const auto i : c10::irange(sites.size())) {
    if (!sites[i].dropped && first_bucket_->captured().change(first_bucket_->index_of(i)).other_mode()) {
      return true;
    }
  }
  return false;
}

}  // namespace sidestream
