// Calls of GraphedCallable.
#include <vector>

#include "graphs/calls/call_set.h"
#include "graphs/calls/call_site.h"
#include "graphs/calls/callable_order.h"
#include "graphs/calls/dispatcher.h"
#include "graphs/calls/engine_sequences.h"
#include "graphs/calls/step_chunks.h"
#include "graphs/resources/engine_resources.h"
#include "observe/sync_finder.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

const char* changed_in_words(const FactsChange& change) {
  if (change.identity) {
    return "its modules, parameters or buffers were replaced";
  }
  return change.relocated ? "a parameter or buffer was relocated" : "a parameter was frozen or unfrozen";
}

/// For weights that a callable's graphs cannot follow now.
const char* way_out(const GraphSequence& sequence) {
  return sequence.captured().options.on_relocated_weights() == OnRelocatedWeights::capture
             ? ", while the backward of a call that was captured with it is pending; change weights when no backward "
               "is "
               "pending: the next call then captures again"
             : "; make the callables or the step again, or set GraphOptions::on_relocated_weights to capture";
}

}  // namespace

void Dispatcher::call_callable(const Call& call) {
  if (call.site.dropped) {
    throw UsageError(describe(call.site) + ": replayed after reset; make the callables again");
  }
  CallSet* const set = call.site.set;
  if (const CallableOrder* const order = call.site.order; order != nullptr) {
    replay_callable(call, order->next(call.site, chunks_.active(), chunks_.step()), GraphSequence::Inputs::unknown);
  } else if (set == nullptr) {
    VariantTable& variants = call.site.variants;
    const CallVariant* const fits = variants.all.size() > 1 ? variants.find(call.request) : nullptr;
    replay_callable(call, fits != nullptr ? *fits : variants.all.front(), GraphSequence::Inputs::unknown);
  } else if (set->awaits(call.site)) {
    record_and_run(call, 0);
  } else {
    if (set->is_first(call.site)) {
      begin_pass(call, *set);
    }
    find_and_replay(call);
  }
}

void Dispatcher::begin_pass(const Call& call, CallSet& set) {
  set.first_replays = false;
  const bool may_capture = set.is_complete() && set.pass.calls().front()->state.modes == call.modes &&
                           !set.is_pending() && !set.is_in_other_mode();
  if (!set.is_complete() || (may_capture && set.pass.outdated())) {
    set.pass.clear();
  } else if (may_capture && agree_to_capture(set.options)) {
    capture_pass(set);
  }
}

void Dispatcher::capture_pass(CallSet& set) {
  const SyncFinder::Pause captures;
  const std::vector<CallSpec> specs = set.take_specs();
  const CallSite& first = set.sites.front();
  while (const CallVariant* const least = first.variants.to_drop(!first.forwards_alone, 1, first.rules)) {
    const auto bucket = static_cast<std::size_t>(least - first.variants.all.data());
    for (CallSite& site : set.sites) {  // none was dropped by the user: the pass is complete
      site.variants.drop(site.variants.all[bucket]);
    }
    EngineCounts::Buckets& counts = counts_.buckets[first.scope->name];
    ++counts.dropped;
    counts.bound = first.rules.max_captures;
  }
  set.add(sequences_.capture(specs, nested_order(specs.size()), set.options));
}

void Dispatcher::replay_callable(const Call& call, const CallVariant& variant, GraphSequence::Inputs known) {
  const CallSite& site = call.site;
  SequenceHolder& holder = *variant.holder;
  std::size_t index = variant.index();
  const CapturedCall* captured = &holder.captured().calls[index];
  const auto prepare = [&] {
    if (call.request.prepare != nullptr) {
      call.request.prepare(call.request.context);
    }
  };
  const auto run_in_place_of_replay = [&](EagerCause cause) {
    prepare();
    run_eagerly(call, cause);
    holder.sequence->ran_eagerly(index);
  };
  FactsChange change = holder.captured().change_of_all(index);
  const bool follows_eager_call = holder.captured().follows_eager_call(index, call.request.inputs);
  if (change.other_mode() || follows_eager_call) {
    run_in_place_of_replay(follows_eager_call ? EagerCause::after_eager_call : EagerCause::other_mode);
    return;
  }
  if (!(captured->spec.state.modes == call.modes)) {
    throw UsageError(describe(site) + ": " +
                     (captured->spec.state.modes.autocast == call.modes.autocast
                          ? "the global switches (deterministic algorithms, precision, back ends) differ from those"
                          : "the state of autocast differs from that") +
                     " at its capture; call it as captured, or capture it again in this state");
  }
  const bool lost = !captured->forward.graph;  // by a capture that failed in its place
  if (!lost && change.stale() && captured->placed_by_hooks) {
    throw UsageError(describe(site) +
                     ": its graphs read weights at the addresses where its capture-time hooks placed them, and now " +
                     holder.captured().difference(index) +
                     "; place the weights there before each replay, and keep them there until its backward has run");
  }
  if (change.layout && !captured->placed_by_hooks) {
    throw UsageError(describe(site) + ": " + holder.captured().difference(index) +
                     " at the capture; make the callables or the step again, with samples for the model as it is");
  }
  // A later call of the pass cannot capture again, since the sequence is pending by then: the first one asks for all.
  const auto may_capture_again = [&] {
    return lost || change.any() ? !holder.sequence->pending().any()
                                : holder.sequence->begins_pass(index) && holder.captured().change_before_pass().any();
  };
  const bool follows_switch =
      holder.switched && !holder.captured().change_before_pass().any() && holder.sequence->begins_pass(index);
  if (follows_switch ||
      (holder.captured().options.on_relocated_weights() == OnRelocatedWeights::capture && may_capture_again())) {
    if (!agree_to_capture(holder.captured().options)) {
      run_in_place_of_replay(EagerCause::not_agreed);
      return;
    }
    sequences_.recapture(holder);
    known = GraphSequence::Inputs::unknown;
    index = variant.index();
    captured = &holder.captured().calls[index];
    change = holder.captured().change_of_all(index);
    if (change.stale() && captured->placed_by_hooks) {
      throw UsageError(describe(site) + ": it was just captured again" +
                       (lost ? ", because an earlier capture had failed," : "") +
                       " and then its capture-time hooks moved its weights (" + holder.captured().difference(index) +
                       "); place the weights where its graphs read them, and call it again");
    }
    if (change.other_mode()) {  // not seen before, beside the modules that were replaced
      run_in_place_of_replay(EagerCause::other_mode);
      return;
    }
  }
  if (change.any()) {
    throw UsageError(describe(site) + ": " + changed_in_words(change) + " since the capture (" +
                     holder.captured().difference(index) + ")" + way_out(*holder.sequence));
  }
  prepare();
  replay(call, variant, known);
  if (site.order != nullptr) {
    site.order->replayed(variant.call, chunks_.step());
  }
}

}  // namespace sidestream
