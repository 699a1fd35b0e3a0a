#include "graphs/calls/call_set.h"

#include <algorithm>
#include <utility>

#include <c10/core/InferenceMode.h>
#include <c10/util/irange.h>

#include "graphs/calls/engine_sequences.h"

namespace sidestream {

CallSet::CallSet(std::size_t callables, GraphOptions given, const std::vector<std::vector<Sample>>& samples,
                 RecordedCalls recorded)
    : sites(callables), options(std::move(given)), pass(std::move(recorded)) {
  for (const std::vector<Sample>& of_callable : samples) {
    std::vector<bool>& linked = linked_.emplace_back();
    for (const Sample& sample : of_callable) {
      linked.push_back(sample.callable() >= 0);
    }
  }
}

void CallSet::call_begins(const CallSite& site) {
  if (is_first(site)) {
    first_replays = false;
    if (!is_complete()) {
      pass.clear();
    }
  }
}

bool CallSet::awaits(const CallSite& site) const noexcept {
  const std::size_t next = pass.calls().size();
  return next > 0 && next < sites.size() && &site == &sites[next];
}

bool CallSet::may_capture(const CallModes& modes) const {
  return is_complete() && pass.calls().front()->state.modes == modes && !c10::InferenceMode::is_enabled() &&
         !is_pending() && !is_in_other_mode();
}

std::vector<CallSpec> CallSet::take_specs(c10::Device device) {
  std::vector<CallSpec> specs;
  for (const auto c : c10::irange(sites.size())) {
    CallSpec& spec = specs.emplace_back(spec_of(*pass.calls()[c]));
    for (const auto i : c10::irange(spec.inputs.size())) {
      CallInput& input = spec.inputs[i];
      if (const std::size_t same = input.aliases->same_as; same != i) {
        input = spec.inputs[same];  // a callable takes each argument for a tensor by itself
      }
      input.aliases.reset();
      if (input.from && !(i < linked_[c].size() && linked_[c][i])) {
        make_unlinked(input, device);
      }
    }
  }
  pass.clear();
  return specs;
}

bool CallSet::is_pending() const {
  const std::vector<CallVariant>& buckets = sites.front().variants.all;
  return std::any_of(buckets.begin(), buckets.end(), [](const CallVariant& bucket) {
    return bucket.holder->sequence->any_pending() || bucket.holder->sequence->has_to_wait();
  });
}

bool CallSet::is_in_other_mode() const {
  for (const auto i : c10::irange(sites.size())) {
    if (!sites[i].dropped) {
      const FactsChange change = first->sequence->change(first->index_of(i));
      if (change.training || change.options) {
        return true;
      }
    }
  }
  return false;
}

}  // namespace sidestream
