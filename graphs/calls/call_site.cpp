#include "graphs/calls/call_site.h"

#include <algorithm>
#include <utility>

#include "sidestream/bucketed_callables.h"

namespace sidestream {
namespace {

bool is_of(const CallVariant& variant, bool gradients) {
  return variant.holder->captured().forwards_alone() != gradients;
}

bool is_idle(const CallVariant& variant) { return !variant.holder->sequence->pending().any(); }

}  // namespace

bool same_arguments(const std::vector<KeptGuard>& kept, const std::vector<std::size_t>& kept_shape,
                    const detail::CallRequest& request) {
  const c10::ArrayRef<detail::Guard> guards = request.guards;
  if (kept.size() != guards.size() || request.shape != kept_shape) {
    return false;
  }
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (*kept[i].type != *guards[i].type || !kept[i].equal(kept[i].value.get(), guards[i].value)) {
      return false;
    }
  }
  return true;
}

CallRules CallRules::of(const CallOptions& options) noexcept {
  return {options.on_new_arguments(), options.on_pending(), options.max_captures(), options.on_max_captures(),
          options.share_memory()};
}

CallRules CallRules::of(const BucketOptions& options) noexcept {
  return {options.on_unknown_shape(),
          options.on_pending() == OnPendingBucket::error ? OnPending::error : OnPending::eager, options.max_buckets(),
          options.on_max_buckets(), true};
}

void VariantTable::add(CallVariant variant) {
  all.push_back(std::move(variant));
  use(all.back());
}

CallVariant* VariantTable::find(const detail::CallRequest& request) {
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const auto& variant) { return variant.accepts(request); });
  return found != all.end() ? &*found : nullptr;
}

bool VariantTable::has_room(bool gradients, std::size_t more, const CallRules& rules) const {
  const auto with_them = more + static_cast<std::size_t>(std::count_if(
                                    all.begin(), all.end(), [&](const auto& v) { return is_of(v, gradients); }));
  const auto bound = static_cast<std::size_t>(rules.max_captures);
  if (with_them <= bound) {
    return true;
  }
  const auto idle = static_cast<std::size_t>(
      std::count_if(all.begin(), all.end(), [&](const auto& v) { return is_of(v, gradients) && is_idle(v); }));
  return rules.on_max_captures == OnMaxCaptures::drop_least_used && with_them - bound <= idle;
}

const CallVariant* VariantTable::to_drop(bool gradients, std::size_t more, const CallRules& rules) const {
  const CallVariant* least = nullptr;
  std::size_t count = 0;
  for (const CallVariant& variant : all) {
    if (!is_of(variant, gradients)) {
      continue;
    }
    ++count;
    if (is_idle(variant) && (least == nullptr || variant.used_at < least->used_at)) {
      least = &variant;
    }
  }
  return more > 0 && count + more > static_cast<std::size_t>(rules.max_captures) ? least : nullptr;
}

void VariantTable::drop(const CallVariant& variant) {
  variant.holder->sequence->release(variant.index());
  all.erase(all.begin() + (&variant - all.data()));
  ++dropped;
}

void VariantTable::release_graphs() const {
  for (const CallVariant& variant : all) {
    variant.holder->sequence->release(variant.index());
  }
}

}  // namespace sidestream
