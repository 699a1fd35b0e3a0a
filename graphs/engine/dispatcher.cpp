#include "graphs/engine/dispatcher.h"

#include <algorithm>
#include <string>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include "graphs/engine/call_context.h"
#include "graphs/engine/eager_plan.h"
#include "graphs/engine/engine_chains.h"
#include "graphs/engine/engine_resources.h"
#include "graphs/engine/recorded_calls.h"
#include "graphs/engine/replay_verification.h"
#include "graphs/engine/report_builder.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// True in the training mode that `site` is captured in: a callable's own, else the module's training.
bool in_captured_mode(const CallSite& site) {
  if (site.module == nullptr) {
    return true;
  }
  const bool training = site.kind != CallSite::Kind::callable ||
                        site.variants.front().holder->chain->layers()[site.variants.front().layer].training;
  return site.module->is_training() == training;
}

/// What every value fulfils whose equality is one.
bool equals_its_copy(const detail::CallRequest& request) {
  return std::all_of(request.guards.begin(), request.guards.end(), [](const detail::Guard& guard) {
    return guard.equal(guard.copy(guard.value).get(), guard.value);
  });
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
  if (!at::GradMode::is_enabled() || !in_captured_mode(site)) {
    return Route::eager;
  }
  if (site.kind == CallSite::Kind::callable) {
    return Route::callable;
  }
  return plan_.state() == EagerPlan::State::unsized ? Route::record : Route::find;
}

void Dispatcher::dispatch(CallSite& site, const detail::CallRequest& request, detail::TensorBuffer& outputs) {
  switch (route(site)) {
    case Route::scope:
      run_eagerly(site, request, outputs);
      break;
    case Route::eager:
      if (site.kind == CallSite::Kind::graphed) {
        report_.eager_call();
      }
      run_eagerly(site, request, outputs);
      break;
    case Route::record:
      record_and_run(site, request, autocast(), outputs, 0);
      break;
    case Route::find:
      find_and_replay(site, request, autocast(), outputs);
      break;
    case Route::callable:
      replay_callable(site, request, autocast(), outputs);
      break;
  }
}

AutocastState Dispatcher::autocast() const { return AutocastState::current(resources_.runtime->device().type()); }

void Dispatcher::run_eagerly(CallSite& site, const detail::CallRequest& request, detail::TensorBuffer& outputs) {
  if (Recorder* recorder = current_recorder(); recorder != nullptr) {
    RecorderScope scope(*recorder, site.scope);
    request.run(request.context, outputs);
    scope.end();
  } else {
    request.run(request.context, outputs);
  }
}

void Dispatcher::record_and_run(CallSite& site, const detail::CallRequest& request, const AutocastState& autocast,
                                detail::TensorBuffer& outputs, std::size_t busy) {
  if (!equals_its_copy(request)) {
    if (!std::exchange(site.warned_of_equality, true)) {
      TORCH_WARN(
          "Sidestream: ", describe(site),
          " runs eagerly: an argument differs from its own copy, so that no capture would ever fit it (a NaN that an "
          "operator== compares?); let the `equal` of its ArgumentTraits hold for a copy");
    }
    report_.eager_call();
    run_eagerly(site, request, outputs);
    return;
  }
  const std::size_t call = recorded_.add(site, request, autocast, busy);
  {
    const CallContext::Enter inside(context_, CallContext::Phase::inside_graphed_call);
    try {
      run_eagerly(site, request, outputs);
    } catch (...) {
      recorded_.forget(call);
      throw;
    }
  }
  recorded_.ran(call, outputs);
  report_.eager_call();
}

void Dispatcher::find_and_replay(CallSite& site, const detail::CallRequest& request, const AutocastState& autocast,
                                 detail::TensorBuffer& outputs) {
  std::size_t busy = 0;
  const CallVariant* other = nullptr;
  for (const CallVariant& variant : site.variants) {
    Chain& chain = *variant.holder->chain;
    if (!(variant.autocast == autocast) ||
        !same_arguments(variant.guards, variant.shape, request.guards, request.shape) ||
        !chain.accepts(variant.layer, request.inputs)) {
      other = &variant;
      continue;
    }
    if (chain.ready(variant.layer)) {
      replay(variant, request, outputs);
      *request.structure = variant.structure.get();
      return;
    }
    ++busy;
  }
  on_mismatch(site, request, autocast, outputs, busy, other);
}

void Dispatcher::replay_callable(CallSite& site, const detail::CallRequest& request, const AutocastState& autocast,
                                 detail::TensorBuffer& outputs) {
  const CallVariant& only = site.variants.front();
  if (site.dropped) {
    throw UsageError(describe(site) + ": replayed after reset; capture it again");
  }
  if (!(only.autocast == autocast)) {
    throw UsageError(describe(site) +
                     ": autocast is in another state than at its capture; call it as captured, or capture again there");
  }
  ChainHolder& holder = *only.holder;
  const bool lost = !holder.chain->layers()[only.layer].forward;  // by a capture that failed in its place
  if ((lost || holder.chain->weights_relocated(only.layer)) &&
      holder.chain->options().on_relocated_weights() == OnRelocatedWeights::capture && !holder.chain->any_pending()) {
    chains_.recapture(holder);
  }
  replay(only, request, outputs);
}

void Dispatcher::replay(const CallVariant& variant, const detail::CallRequest& request, detail::TensorBuffer& outputs) {
  if (verification_ != nullptr) {
    verification_->forward(variant.holder->chain, variant.layer, request, outputs);
  } else {
    variant.holder->chain->forward(variant.layer, request.inputs, outputs);
  }
}

void Dispatcher::on_mismatch(CallSite& site, const detail::CallRequest& request, const AutocastState& autocast,
                             detail::TensorBuffer& outputs, std::size_t busy, const CallVariant* other) {
  const CallOptions& options = resources_.options.call_options();
  if (busy == 0 && options.on_new_arguments() == OnNewArguments::eager) {
    report_.eager_call();
    run_eagerly(site, request, outputs);
    return;
  }
  const std::string what = describe(site);
  if (busy > 0 && options.on_pending() == OnPending::error) {
    throw UsageError(what +
                     ": the backward of its previous forward is still pending, and this forward would overwrite what " +
                     "it needs; run that backward first, or set CallOptions::on_pending to capture");
  }
  if (busy == 0 && options.on_new_arguments() == OnNewArguments::error) {
    if (other != nullptr && same_arguments(other->guards, other->shape, request.guards, request.shape)) {
      other->holder->chain->check(other->layer, request.inputs);
    }
    throw UsageError(what +
                     ": an argument that is not a tensor has a new value, or autocast another state; set "
                     "CallOptions::on_new_arguments to capture or eager, or pass it as a tensor");
  }
  if (static_cast<std::int64_t>(site.variants.size() + recorded_.count(site)) >= options.max_captures()) {
    if (!std::exchange(site.warned_of_bound, true)) {
      TORCH_WARN("Sidestream: ", what, " needs more than the ", options.max_captures(),
                 " captures that CallOptions::max_captures allows (",
                 busy > 0 ? "microbatches in flight" : "new argument values, shapes or gradient flags",
                 "); what fits none of them runs eagerly from here on: raise the bound, or give it fewer");
    }
    report_.eager_call();
    run_eagerly(site, request, outputs);
    return;
  }
  record_and_run(site, request, autocast, outputs, busy);
}

}  // namespace sidestream
