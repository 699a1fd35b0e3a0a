#include "graphs/calls/dispatcher.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/nn/module.h>

#include "graphs/calls/call_set.h"
#include "graphs/calls/call_site.h"
#include "graphs/calls/engine_counts.h"
#include "graphs/calls/engine_sequences.h"
#include "graphs/calls/recorded_calls.h"
#include "graphs/calls/step_chunks.h"
#include "graphs/guards/call_spec.h"
#include "graphs/resources/call_context.h"
#include "graphs/resources/eager_plan.h"
#include "graphs/resources/engine_resources.h"
#include "graphs/sequence/sequence_streams.h"
#include "graphs/verify/replay_verification.h"
#include "observe/sync_finder.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// True if each argument that is not a tensor equals its own copy. A NaN does not.
bool equals_its_copy(const detail::CallRequest& request) {
  return std::all_of(request.guards.begin(), request.guards.end(), [](const detail::Guard& guard) {
    return guard.equal(guard.copy(guard.value).get(), guard.value);
  });
}

}  // namespace

Dispatcher::Route Dispatcher::route(const CallSite& site) const {
  // A callable replays also outside of steps and inside of recorded calls. A capture cannot launch its graphs. A graphed step asks autograd
  // for gradients, and gradients that graphs add or delay are not part of the answer.
  const bool may_replay = site.kind == CallSite::Kind::callable
                              ? context_.callables_replay()
                              : site.kind == CallSite::Kind::graphed && context_.phase() == CallContext::Phase::open;
  if (!may_replay) {
    return Route::scope;
  }
  const bool in_backward = site.kind == CallSite::Kind::graphed && torch::autograd::get_current_node() != nullptr;
  if (c10::InferenceMode::is_enabled() || in_backward) {
    return Route::eager;
  }
  if (site.kind == CallSite::Kind::callable) {
    return site.forwards_alone != at::GradMode::is_enabled() ? Route::callable : Route::eager;
  }
  if (at::GradMode::is_enabled()) {
    if (site.module != nullptr && !site.module->is_training()) {
      return Route::eager;
    }
  } else if (resources_.options.call_options().on_evaluation() == OnEvaluation::eager) {
    return Route::eager;
  }
  return plan_.state() == EagerPlan::State::unsized ? Route::record : Route::find;
}

void Dispatcher::dispatch(CallSite& site, const detail::CallRequest& request, detail::TensorBuffer& outputs) {
  const StepSyncs::InCall in_call(site.kind == CallSite::Kind::eager ? nullptr : resources_.syncs.get(),
                                  site.scope->name);
  switch (route(site)) {
    case Route::scope:
      if (request.prepare != nullptr) {
        throw UsageError("graphed step \"" + site.scope->name +
                         "\": it was called in the body of a graphed call or step; call it outside of them");
      }
      run_eagerly(site, request, outputs);
      break;
    case Route::eager:
      count_eager(site, cause_on_this_thread(site.forwards_alone ? EagerCause::with_gradients : EagerCause::eval_mode));
      run_eagerly(site, request, outputs);
      break;
    case Route::record:
      record_and_run({site, request, outputs, modes()}, 0);
      break;
    case Route::find:
      find_and_replay({site, request, outputs, modes()});
      break;
    case Route::callable:
      call_callable({site, request, outputs, modes()});
      break;
  }
}

CallModes Dispatcher::modes() const {
  CallModes modes = CallModes::current(resources_.runtime->device().type());
  modes.gradients = at::GradMode::is_enabled();
  return modes;
}

RunningChunk* Dispatcher::chunk_of(const Call& call) const {
  return call.site.kind == CallSite::Kind::graphed && call.modes.gradients ? chunks_.active() : nullptr;
}

void Dispatcher::count_eager(CallSite& site, EagerCause cause) {
  ++counts_.report.eager_calls;
  (site.set != nullptr ? counts_.buckets[site.scope->name].runs : site.eager_runs).count(cause);
}

void Dispatcher::run_eagerly(CallSite& site, const detail::CallRequest& request, detail::TensorBuffer& outputs) {
  const bool is_graphed_step = request.prepare != nullptr;
  const CallContext::Enter inside(context_, is_graphed_step ? CallContext::Phase::plain : context_.phase());
  site.eager_runs_without_dw += at::GradMode::is_enabled() && context_.callables_replay() ? 1 : 0;
  if (site.kind == CallSite::Kind::graphed && at::GradMode::is_enabled()) {
    latest_ = nullptr;
  }
  if (SavedTensorRecorder* recorder = current_recorder();
      recorder != nullptr && recorder->knows_scopes_of(resources_.tree)) {
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

void Dispatcher::run_eagerly(const Call& call, EagerCause cause) {
  count_eager(call.site, cause);
  run_eagerly(call.site, call.request, call.outputs);
}

void Dispatcher::record_and_run(const Call& call, std::size_t busy) {
  CallSite& site = call.site;
  if (!equals_its_copy(call.request)) {
    warn_of_equality(site);
    run_eagerly(call, EagerCause::unequal);
    return;
  }
  RecordedCalls& recorded = site.set != nullptr ? site.set->pass : recorded_;
  const bool decides = site.set == nullptr || site.set->is_first(site);  // else it is captured with the first callable
  const bool gradients = call.modes.gradients;
  RunningChunk* const chunk = chunk_of(call);
  if (decides && !site.variants.has_room(gradients, recorded.count(site, gradients) + 1, site.rules) &&
      !recorded.repeated(site, call.request, call.modes, chunk)) {
    warn_of_bound(site, busy > 0);
    run_eagerly(call, site.set != nullptr ? EagerCause::no_bucket : EagerCause::over_bound);
    return;
  }
  refuse_composite_inputs(describe(site), call.request.inputs);
  const std::size_t added = [&] {
    const SyncFinder::Pause keeps_copies;  // on the host
    return recorded.add(site, call.request, call.modes, busy, chunk);
  }();
  {
    const CallContext::Enter inside(context_, CallContext::Phase::inside_graphed_call);
    const CapturedLater captured_later(current_recorder());
    resources_.rest->call_begins();
    try {
      run_eagerly(site, call.request, call.outputs);
      refuse_composite_outputs(describe(site), call.outputs);
    } catch (...) {
      recorded.forget(added);
      throw;
    }
    resources_.rest->call_ends();
  }
  recorded.ran(added, call.outputs);
  if (site.set != nullptr) {
    count_eager(site, EagerCause::no_bucket);
  } else {
    ++counts_.report.eager_calls;
  }
}

void Dispatcher::find_and_replay(const Call& call) {
  const Found found = find(call);
  CallSet* const set = call.site.set;
  // If the rule of a bucketed call is an error, the sequence says which backward is pending.
  const bool refuses = set != nullptr && found.ready == nullptr && call.site.rules.on_pending == OnPending::error;
  if (found.stale != nullptr) {
    run_beside_stale_capture(call, *found.stale);
  } else if (CallVariant* const fits = refuses ? found.pending : found.ready; fits != nullptr) {
    call.site.variants.use(*fits);
    if (set != nullptr) {
      set->first_replays = set->first_replays || set->is_first(call.site);
      replay_callable(call, *fits, GraphSequence::Inputs::accepted);
    } else {
      if (RunningChunk* const chunk = chunk_of(call); chunk != nullptr) {
        chunk->slot = chunk->slot.value_or(fits->slot);
        chunk->sequence = fits->holder->sequence.get();
        chunk->next_run = fits->index() + 1;
      }
      if (call.modes.gradients) {
        latest_ = fits->holder->sequence.get();
      }
      replay(call, *fits, GraphSequence::Inputs::accepted);
      *call.request.structure = fits->structure.get();
    }
  } else if (set != nullptr && set->is_in_other_mode()) {
    run_eagerly(call, EagerCause::other_mode);
  } else if (found.pending != nullptr) {
    on_pending(call, found);
  } else {
    on_mismatch(call, found);
  }
}

void Dispatcher::on_pending(const Call& call, const Found& found) {
  switch (call.site.rules.on_pending) {
    case OnPending::error:
      if (found.waiting != nullptr) {
        found.waiting->holder->captured().memory->refuse(describe(call.site));
      }
      refuse_own_pending(call.site);
    case OnPending::capture:
      if (found.waiting == nullptr) {
        record_and_run(call, found.busy);
        return;
      }
      break;  // another capture in the same memory would have to wait as well
    case OnPending::eager:
      break;
  }
  run_eagerly(call, EagerCause::shared_memory);
}

std::optional<EagerCause> Dispatcher::excuse(const CallSite& site) const {
  if (site.set == nullptr) {
    return sequences_.postponed();
  }
  // If a backward is pending, the callables before this one may have run eagerly. Then inputs that are linked to their outputs fit nothing.
  const bool expected = site.rules.on_new_arguments == OnNewArguments::capture
                            ? !site.set->first_replays
                            : site.rules.on_pending == OnPending::eager;
  return expected && site.set->is_pending() ? std::optional(EagerCause::shared_memory) : std::nullopt;
}

void Dispatcher::on_mismatch(const Call& call, const Found& found) {
  CallSite& site = call.site;
  if (const auto cause = excuse(site)) {
    run_eagerly(call, *cause);
    return;
  }
  switch (site.to_record ? OnNewArguments::capture : site.rules.on_new_arguments) {
    case OnNewArguments::error:
      refuse_new_arguments(site, call.request, found.other);
    case OnNewArguments::capture:
      if (site.set == nullptr || (site.set->is_first(site) && site.set->pass.empty())) {
        record_and_run(call, 0);
        return;
      }
      if (site.set->first_replays) {
        warn_of_new_arguments(site);
      }
      break;
    case OnNewArguments::eager:
      warn_of_new_arguments(site);
      break;
  }
  run_eagerly(call, site.set != nullptr ? EagerCause::no_bucket : EagerCause::new_arguments);
}

void Dispatcher::run_beside_stale_capture(const Call& call, const CallVariant& variant) {
  const GraphSequence& sequence = *variant.holder->sequence;
  if (sequence.captured().options.on_relocated_weights() == OnRelocatedWeights::error) {
    throw UsageError(describe(call.site) + ": " + sequence.captured().difference(variant.index()) +
                     ": weights were relocated or replaced since the capture; call OffloadEngine::reset, or set "
                     "GraphOptions::on_relocated_weights to capture");
  }
  ++counts_.report.eager_calls;  // the next step begins with captures of what the model is then
  resources_.owned_gradients.renew_accumulators();
  run_eagerly(call.site, call.request, call.outputs);
}

void Dispatcher::replay(const Call& call, const CallVariant& variant, GraphSequence::Inputs known) {
  const std::size_t index = variant.index();
  if (verification_ != nullptr && at::GradMode::is_enabled()) {
    const SyncFinder::Pause compares;
    verification_->forward(variant.holder->sequence, index, call.request, call.outputs);
  } else {
    variant.holder->sequence->forward(index, call.request.inputs, call.outputs, call.request.replay, known);
  }
  if (variant.holder->captured().weights_pool != nullptr || variant.holder->order != nullptr) {
    const RunningChunk* const chunk = chunks_.active();
    const bool in_order = chunk != nullptr && variant.holder->order != nullptr;
    variant.holder->sequence->set_chunk(index, chunk != nullptr ? chunk->number : 0,
                                        in_order ? std::optional(chunk->id) : std::nullopt);
  }
}

}  // namespace sidestream
