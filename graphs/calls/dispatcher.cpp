#include "graphs/calls/dispatcher.h"

#include <algorithm>
#include <string>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/nn/module.h>

#include "graphs/calls/engine_counts.h"
#include "graphs/calls/engine_sequences.h"
#include "graphs/calls/recorded_calls.h"
#include "graphs/resources/call_context.h"
#include "graphs/resources/eager_plan.h"
#include "graphs/resources/engine_resources.h"
#include "graphs/sequence/graph_event_state.h"
#include "graphs/verify/replay_verification.h"
#include "observe/sync_finder.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// What every value fulfils whose equality is one.
bool equals_its_copy(const detail::CallRequest& request) {
  return std::all_of(request.guards.begin(), request.guards.end(), [](const detail::Guard& guard) {
    return guard.equal(guard.copy(guard.value).get(), guard.value);
  });
}

const char* changed_in_words(const FactsChange& change) {
  if (change.identity) {
    return "its modules, parameters or buffers were replaced";
  }
  return change.relocated ? "a parameter or buffer was relocated" : "a parameter was frozen or unfrozen";
}

/// For weights that a callable's graphs cannot follow now.
const char* way_out(const GraphSequence& sequence) {
  return sequence.options().on_relocated_weights() == OnRelocatedWeights::capture
             ? ", while the backward of a call that was captured with it is pending; change weights when no backward "
               "is "
               "pending: the next call then captures again"
             : "; call make_graphed_callables again, or set GraphOptions::on_relocated_weights to capture";
}

std::string describe(const CallSite& site) { return "graphed call \"" + site.scope->name + "\""; }

}  // namespace

Dispatcher::Route Dispatcher::route(const CallSite& site) const {
  // A callable replays wherever it is called: outside of steps, inside of recorded calls.
  const bool may_replay = site.kind == CallSite::Kind::callable ||
                          (site.kind == CallSite::Kind::graphed && context_.phase() == CallContext::Phase::open);
  if (!may_replay) {
    return Route::scope;
  }
  const bool in_backward = site.kind == CallSite::Kind::graphed && torch::autograd::get_current_node() != nullptr;
  if (c10::InferenceMode::is_enabled() || in_backward) {
    return Route::eager;
  }
  if (site.kind == CallSite::Kind::callable) {
    const bool forward_alone = site.variants.front().holder->sequence->forwards_alone();
    return forward_alone != at::GradMode::is_enabled() ? Route::callable : Route::eager;
  }
  if (!at::GradMode::is_enabled()) {
    return route_of_evaluation();
  }
  if (site.module != nullptr && !site.module->is_training()) {
    return Route::eager;
  }
  return plan_.state() == EagerPlan::State::unsized ? Route::record : Route::find;
}

Dispatcher::Route Dispatcher::route_of_evaluation() const {
  if (resources_.options.call_options().on_evaluation() == OnEvaluation::eager) {
    return Route::eager;
  }
  return plan_.state() == EagerPlan::State::unsized ? Route::record : Route::find;
}

void Dispatcher::dispatch(CallSite& site, const detail::CallRequest& request, detail::TensorBuffer& outputs) {
  const StepSyncs::InCall in_call(site.kind == CallSite::Kind::eager ? nullptr : resources_.syncs.get(),
                                  site.scope->name);
  switch (route(site)) {
    case Route::scope:
      run_eagerly(site, request, outputs);
      break;
    case Route::eager:
      count_eager(site, cause_on_this_thread());
      run_eagerly(site, request, outputs);
      break;
    case Route::record:
      record_and_run(site, request, modes(), outputs, 0);
      break;
    case Route::find:
      find_and_replay(site, request, modes(), outputs);
      break;
    case Route::callable:
      replay_callable(site, request, modes(), outputs);
      break;
  }
}

CallModes Dispatcher::modes() const {
  CallModes modes = CallModes::current(resources_.runtime->device().type());
  modes.gradients = at::GradMode::is_enabled();
  return modes;
}

void Dispatcher::count_eager(CallSite& site, EagerCause cause) noexcept {
  counts_.eager_call();
  site.eager_runs.count(cause);
}

void Dispatcher::run_eagerly(CallSite& site, const detail::CallRequest& request, detail::TensorBuffer& outputs) {
  if (SavedTensorRecorder* recorder = current_recorder(); recorder != nullptr) {
    RecorderScope scope(*recorder, site.scope);
    request.run(request.context, outputs);
    scope.end();
  } else {
    request.run(request.context, outputs);
  }
  if (request.replay != nullptr && request.replay->event() != nullptr) {
    resources_.runtime->record(GraphEventState::event_of(*request.replay->event()),
                               resources_.runtime->current_stream());
  }
}

void Dispatcher::record_and_run(CallSite& site, const detail::CallRequest& request, const CallModes& modes,
                                detail::TensorBuffer& outputs, std::size_t busy) {
  if (!equals_its_copy(request)) {
    if (!std::exchange(site.warned_of_equality, true)) {
      TORCH_WARN("Sidestream: ", describe(site),
                 " runs eagerly: an argument compares unequal to its own copy (does operator== compare a NaN?), so no "
                 "capture can match it. Let `equal` of its ArgumentTraits return true for a copy");
    }
    count_eager(site, EagerCause::unequal);
    run_eagerly(site, request, outputs);
    return;
  }
  const std::int64_t bound = resources_.options.call_options().max_captures();
  if (!may_capture(site, modes) && !recorded_.repeats(site, request, modes)) {
    if (resources_.options.call_options().on_max_captures() == OnMaxCaptures::error) {
      throw UsageError(describe(site) + ": it needs more than the " + std::to_string(bound) +
                       " captures that CallOptions::max_captures allows; raise the bound, pass fewer shapes and "
                       "values, or set CallOptions::on_max_captures to eager or drop_least_used");
    }
    if (!std::exchange(site.warned_of_bound, true)) {
      TORCH_WARN(
          "Sidestream: ", describe(site), " needs more than the ", bound,
          " captures that CallOptions::max_captures allows (",
          busy > 0 ? "microbatches in flight"
                   : "new argument values, shapes, modes or gradient flags, or more calls in flight",
          "). From now on it runs eagerly when no capture matches; raise the bound, or pass fewer shapes and values");
    }
    count_eager(site, EagerCause::over_bound);
    run_eagerly(site, request, outputs);
    return;
  }
  const std::size_t call = [&] {
    const SyncFinder::Pause keeps_copies;  // on the host
    return recorded_.add(site, request, modes, busy);
  }();
  {
    const CallContext::Enter inside(context_, CallContext::Phase::inside_graphed_call);
    const CapturedLater captured_later(current_recorder());
    resources_.rest->call_begins();
    try {
      run_eagerly(site, request, outputs);
    } catch (...) {
      recorded_.forget(call);
      throw;
    }
    resources_.rest->call_ends();
  }
  recorded_.ran(call, outputs);
  counts_.eager_call();
}

void Dispatcher::find_and_replay(CallSite& site, const detail::CallRequest& request, const CallModes& modes,
                                 detail::TensorBuffer& outputs) {
  std::size_t busy = 0;
  const CallVariant* other = nullptr;
  const CallVariant* waiting = nullptr;
  for (CallVariant& variant : site.variants) {
    GraphSequence& sequence = *variant.holder->sequence;
    const std::size_t index = variant.index();
    if (!(sequence.calls()[index].spec.state.modes == modes) ||
        !same_arguments(variant.guards, variant.shape, request.guards, request.shape) ||
        !sequence.accepts(index, request.inputs)) {
      other = &variant;
      continue;
    }
    // Where not all ranks capture, the step's begin has seen what is outdated and left it as it is.
    const FactsChange change = sequences_.postponed() ? sequence.change_of_all(index) : sequence.change(index);
    if (change.stale()) {
      run_beside_stale_capture(site, request, outputs, variant);
      return;
    }
    if (change.any()) {
      other = &variant;
      continue;
    }
    if (sequence.has_to_wait()) {
      waiting = &variant;
      continue;
    }
    if (sequence.ready(index)) {
      variant.used_at = ++site.clock;
      replay(variant, index, request, outputs, GraphSequence::Inputs::accepted);
      *request.structure = variant.structure.get();
      return;
    }
    ++busy;
  }
  if (waiting != nullptr) {
    run_beside_pending(site, request, outputs, *waiting);
    return;
  }
  on_mismatch(site, request, modes, outputs, busy, other);
}

void Dispatcher::run_beside_pending(CallSite& site, const detail::CallRequest& request, detail::TensorBuffer& outputs,
                                    const CallVariant& variant) {
  if (resources_.options.call_options().on_pending() == OnPending::error) {
    variant.holder->sequence->refuse_turn(describe(site));
  }
  count_eager(site, EagerCause::shared_memory);
  run_eagerly(site, request, outputs);
}

bool Dispatcher::may_capture(const CallSite& site, const CallModes& modes) const {
  const CallOptions& options = resources_.options.call_options();
  const auto bound = static_cast<std::size_t>(options.max_captures());
  const std::size_t with_it = site.count(modes.gradients) + recorded_.count(site, modes.gradients) + 1;
  if (with_it <= bound) {
    return true;
  }
  return options.on_max_captures() == OnMaxCaptures::drop_least_used &&
         with_it - bound <= site.count_idle(modes.gradients);
}

void Dispatcher::run_beside_stale_capture(CallSite& site, const detail::CallRequest& request,
                                          detail::TensorBuffer& outputs, const CallVariant& variant) {
  const GraphSequence& sequence = *variant.holder->sequence;
  if (sequence.options().on_relocated_weights() == OnRelocatedWeights::error) {
    throw UsageError(describe(site) + ": " + sequence.difference(variant.index()) +
                     ": weights were relocated or replaced since the capture; call OffloadEngine::reset, or set "
                     "GraphOptions::on_relocated_weights to capture");
  }
  counts_.eager_call();  // the next step begins with captures of what the model is then
  run_eagerly(site, request, outputs);
}

void Dispatcher::replay_callable(CallSite& site, const detail::CallRequest& request, const CallModes& modes,
                                 detail::TensorBuffer& outputs) {
  const CallVariant& only = site.variants.front();
  if (site.dropped) {
    throw UsageError(describe(site) + ": replayed after reset; capture it again");
  }
  SequenceHolder& holder = *only.holder;
  std::size_t index = only.index();
  const CapturedCall* call = &holder.sequence->calls()[index];
  const auto prepare = [&] {
    if (request.prepare != nullptr) {
      request.prepare(request.context);
    }
  };
  FactsChange change = holder.sequence->change_of_all(index);
  if (change.training || change.options) {
    count_eager(site, EagerCause::other_mode);
    prepare();
    run_eagerly(site, request, outputs);
    return;
  }
  if (!(call->spec.state.modes == modes)) {
    throw UsageError(describe(site) + ": " +
                     (call->spec.state.modes.autocast == modes.autocast
                          ? "the global switches (deterministic algorithms, precision, back ends) differ from those"
                          : "the state of autocast differs from that") +
                     " at its capture; call it as captured, or capture it again in this state");
  }
  const bool lost = !call->forward.graph;  // by a capture that failed in its place
  if (!lost && change.stale() && call->placed_by_hooks) {
    throw UsageError(describe(site) +
                     ": its graphs read weights at the addresses where its capture-time hooks placed them, and now " +
                     holder.sequence->difference(index) +
                     "; place the weights there before each replay, and keep them there until its backward has run");
  }
  if (change.layout && !call->placed_by_hooks) {
    throw UsageError(describe(site) + ": " + holder.sequence->difference(index) +
                     " at the capture; make_graphed_callables again with samples for the model as it is");
  }
  // A later call of the pass cannot capture again, since the sequence is pending by then: the first one asks for all.
  const auto may_capture_again = [&] {
    return lost || change.any() ? !holder.sequence->any_pending()
                                : holder.sequence->begins_pass(index) && holder.sequence->change_before_pass().any();
  };
  if (holder.sequence->options().on_relocated_weights() == OnRelocatedWeights::capture && may_capture_again()) {
    if (const auto& ask = holder.sequence->options().agree_to_capture(); ask && !ask(/*mine=*/true)) {
      counts_.eager_call();
      prepare();
      run_eagerly(site, request, outputs);
      return;
    }
    sequences_.recapture(holder);
    index = only.index();
    call = &holder.sequence->calls()[index];
    change = holder.sequence->change_of_all(index);
    if (change.stale() && call->placed_by_hooks) {
      throw UsageError(describe(site) + ": it was just captured again" +
                       (lost ? ", because an earlier capture had failed," : "") +
                       " and then its capture-time hooks moved its weights (" + holder.sequence->difference(index) +
                       "); place the weights where its graphs read them, and call it again");
    }
  }
  if (change.any()) {
    throw UsageError(describe(site) + ": " + changed_in_words(change) + " since the capture (" +
                     holder.sequence->difference(index) + ")" + way_out(*holder.sequence));
  }
  prepare();
  replay(only, index, request, outputs, GraphSequence::Inputs::unknown);
}

void Dispatcher::replay(const CallVariant& variant, std::size_t call, const detail::CallRequest& request,
                        detail::TensorBuffer& outputs, GraphSequence::Inputs known) {
  if (verification_ != nullptr && at::GradMode::is_enabled()) {
    const SyncFinder::Pause compares;
    verification_->forward(variant.holder->sequence, call, request, outputs);
  } else {
    variant.holder->sequence->forward(call, request.inputs, outputs, request.replay, known);
  }
}

void Dispatcher::on_mismatch(CallSite& site, const detail::CallRequest& request, const CallModes& modes,
                             detail::TensorBuffer& outputs, std::size_t busy, const CallVariant* other) {
  const CallOptions& options = resources_.options.call_options();
  const bool to_be_new = busy == 0 && !site.to_record;
  if ((busy == 0 && sequences_.postponed()) || (to_be_new && options.on_new_arguments() == OnNewArguments::eager)) {
    if (options.share_memory() && to_be_new && !std::exchange(site.warned_of_arguments, true)) {
      TORCH_WARN("Sidestream: ", describe(site),
                 " runs eagerly: its arguments match none of its captures, and CallOptions::on_new_arguments is eager");
    }
    count_eager(site, EagerCause::new_arguments);
    run_eagerly(site, request, outputs);
    return;
  }
  if (busy > 0 && options.on_pending() == OnPending::eager) {
    count_eager(site, EagerCause::shared_memory);
    run_eagerly(site, request, outputs);
    return;
  }
  const std::string what = describe(site);
  if (busy > 0 && options.on_pending() == OnPending::error) {
    throw UsageError(what +
                     ": the backward of its previous forward is still pending, and this forward would overwrite what " +
                     "it needs; run that backward first, or set CallOptions::on_pending to capture");
  }
  if (to_be_new && options.on_new_arguments() == OnNewArguments::error) {
    if (other != nullptr && other->holder->sequence->change(other->index()).any()) {
      throw UsageError(what + ": " + other->holder->sequence->difference(other->index()) +
                       " at the capture; set CallOptions::on_new_arguments to capture or eager");
    }
    if (other != nullptr && same_arguments(other->guards, other->shape, request.guards, request.shape)) {
      other->holder->sequence->check(other->index(), request.inputs);
    }
    throw UsageError(what +
                     ": an argument that is not a tensor has a new value, or the state of autocast or of a global "
                     "switch (deterministic algorithms, precision, back ends) changed. Set "
                     "CallOptions::on_new_arguments to capture or eager, or pass the value as a tensor");
  }
  record_and_run(site, request, modes, outputs, busy);
}

}  // namespace sidestream
