#include "graphs/calls/call_site.h"

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

#include "sidestream/bucketed_callables.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

bool is_of(const CallVariant& variant, bool gradients) {
  return variant.holder->captured().forwards_alone() != gradients;
}

/// No call of its sequence awaits a backward.
bool is_idle(const CallVariant& variant) { return !variant.holder->sequence->pending().any(); }

/// The call itself awaits its backward.
bool is_pending(const CallVariant& variant) {
  return variant.holder->sequence->pending().any_of([&](std::size_t call) { return call == variant.index(); });
}

std::string describe_bucketed(const CallSite& site) { return "bucketed call \"" + site.scope->name + "\""; }

std::string fits_none(const CallSite& site) {
  return "its inputs fit none of the " + std::to_string(site.variants.all.size()) + " buckets";
}

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

std::size_t VariantTable::count(bool gradients) const noexcept {
  return static_cast<std::size_t>(
      std::count_if(all.begin(), all.end(), [&](const auto& v) { return is_of(v, gradients); }));
}

bool VariantTable::has_room(bool gradients, std::size_t more, const CallRules& rules) const {
  const std::size_t with_them = more + count(gradients);
  const auto bound = static_cast<std::size_t>(rules.max_captures);
  if (with_them <= bound) {
    return true;
  }
  // A variant is dropped when a step begins. By then other calls of its sequence have run their backwards, as a rule.
  const auto idle = static_cast<std::size_t>(
      std::count_if(all.begin(), all.end(), [&](const auto& v) { return is_of(v, gradients) && !is_pending(v); }));
  return rules.on_max_captures == OnMaxCaptures::drop_least_used && with_them - bound <= idle;
}

const CallVariant* VariantTable::to_drop(bool gradients, std::size_t more, const CallRules& rules) const {
  const CallVariant* least = nullptr;
  for (const CallVariant& variant : all) {
    if (is_of(variant, gradients) && is_idle(variant) && (least == nullptr || variant.used_at < least->used_at)) {
      least = &variant;
    }
  }
  return more > 0 && count(gradients) + more > static_cast<std::size_t>(rules.max_captures) ? least : nullptr;
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

std::string describe(const CallSite& site) { return "graphed call \"" + site.scope->name + "\""; }

void refuse_new_arguments(const CallSite& site, const detail::CallRequest& request, const CallVariant* other) {
  if (site.set != nullptr) {
    throw UsageError(describe_bucketed(site) + ": " + fits_none(site) +
                     " (shapes, dtypes, requires_grad); pass inputs as captured, add a bucket, or set "
                     "BucketOptions::on_unknown_shape to eager or capture");
  }
  if (other != nullptr && other->holder->captured().change(other->index()).any()) {
    throw UsageError(describe(site) + ": " + other->holder->captured().difference(other->index()) +
                     " at the capture; set CallOptions::on_new_arguments to capture or eager");
  }
  if (other != nullptr && same_arguments(other->guards, other->shape, request)) {
    other->holder->captured().check(other->index(), request.inputs);
  }
  throw UsageError(describe(site) +
                   ": an argument that is not a tensor has a new value, or the state of autocast or of a global "
                   "switch (deterministic algorithms, precision, back ends) changed. Set "
                   "CallOptions::on_new_arguments to capture or eager, or pass the value as a tensor");
}

void warn_of_new_arguments(CallSite& site) {
  if (!site.rules.warns || std::exchange(site.warned.of_arguments, true)) {
    return;
  }
  if (site.set == nullptr) {
    TORCH_WARN("Sidestream: ", describe(site),
               " runs eagerly: its arguments match none of its captures, and CallOptions::on_new_arguments is eager");
    return;
  }
  TORCH_WARN(
      "Sidestream: ", describe_bucketed(site), " runs eagerly: ", fits_none(site),
      site.rules.on_new_arguments != OnNewArguments::capture
          ? ""
          : ", although those of the first callable fit one. The first callable decides which bucket a pass uses");
}

void refuse_own_pending(const CallSite& site) {
  throw UsageError(describe(site) +
                   ": the backward of its previous forward is still pending, and this forward would overwrite what it "
                   "needs; run that backward first, or set CallOptions::on_pending to capture");
}

void warn_of_bound(CallSite& site, bool in_flight) {
  const std::int64_t bound = site.rules.max_captures;
  if (site.rules.on_max_captures == OnMaxCaptures::error) {
    throw UsageError(
        site.set != nullptr
            ? describe_bucketed(site) + ": " + fits_none(site) +
                  ", and BucketOptions::max_buckets allows no more; raise it, pass fewer shapes, or set "
                  "BucketOptions::on_max_buckets to eager or drop_least_used"
            : describe(site) + ": it needs more than the " + std::to_string(bound) +
                  " captures that CallOptions::max_captures allows; raise the bound, pass fewer shapes and "
                  "values, or set CallOptions::on_max_captures to eager or drop_least_used");
  }
  if (std::exchange(site.warned.of_bound, true)) {
    return;
  }
  if (site.set != nullptr) {
    TORCH_WARN("Sidestream: ", describe_bucketed(site), " runs eagerly: ", fits_none(site),
               ", and BucketOptions::max_buckets allows no more");
    return;
  }
  TORCH_WARN(
      "Sidestream: ", describe(site), " needs more than the ", bound,
      " captures that CallOptions::max_captures allows (",
      in_flight ? "microbatches in flight"
                : "new argument values, modules, shapes, modes or gradient flags, or more calls in flight",
      "). From now on it runs eagerly when no capture matches; raise the bound, pass fewer shapes and values, or give "
      "the calls of other layers names of their own");
}

void warn_of_equality(CallSite& site) {
  if (!std::exchange(site.warned.of_equality, true)) {
    TORCH_WARN("Sidestream: ", describe(site),
               " runs eagerly: an argument compares unequal to its own copy (does operator== compare a NaN?), so no "
               "capture can match it. Let `equal` of its ArgumentTraits return true for a copy");
  }
}

}  // namespace sidestream
