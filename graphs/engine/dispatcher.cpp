#include "graphs/engine/dispatcher.h"

#include <string>

#include <ATen/core/grad_mode.h>

#include "graphs/engine/call_context.h"
#include "graphs/engine/eager_plan.h"
#include "graphs/engine/engine_chains.h"
#include "graphs/engine/engine_resources.h"
#include "graphs/engine/recorded_calls.h"
#include "graphs/engine/report_builder.h"
#include "sidestream/error.h"

namespace sidestream {

void Dispatcher::run_eagerly(CallSite& site, detail::CallRequest& request, detail::TensorBuffer& outputs) {
  if (Recorder* recorder = current_recorder(); recorder != nullptr) {
    const RecorderScope scope(*recorder, site.scope);
    request.run(request.context, outputs);
  } else {
    request.run(request.context, outputs);
  }
}

void Dispatcher::dispatch(CallSite& site, detail::CallRequest& request, detail::TensorBuffer& outputs) {
  const bool may_be_graphed = site.graphed && context_.phase() == CallContext::Phase::open;
  if (!may_be_graphed || !at::GradMode::is_enabled() || (site.module != nullptr && !site.module->is_training())) {
    if (may_be_graphed) {
      report_.eager_call();
    }
    run_eagerly(site, request, outputs);
  } else if (plan_.state() == EagerPlan::State::unsized) {
    record_and_run(site, request, outputs, 0);
  } else {
    replay_or_record(site, request, outputs);
  }
}

void Dispatcher::record_and_run(CallSite& site, detail::CallRequest& request, detail::TensorBuffer& outputs,
                                std::size_t busy) {
  const std::size_t call =
      recorded_.add(site, request, AutocastState::current(resources_.runtime->device().type()), busy);
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

void Dispatcher::replay_or_record(CallSite& site, detail::CallRequest& request, detail::TensorBuffer& outputs) {
  const AutocastState autocast = AutocastState::current(resources_.runtime->device().type());
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
      chain.forward(variant.layer, request.inputs, outputs);
      return;
    }
    ++busy;
  }
  const GraphOptions& options = resources_.options.graph_options();
  const std::string what = "graphed call \"" + site.scope->name + "\"";
  if (busy > 0 && options.on_pending() == OnChange::error) {
    throw UsageError(what +
                     ": the backward of its previous forward is still pending, and this forward would overwrite what " +
                     "it needs; run that backward first, or set GraphOptions::on_pending to capture");
  }
  if (busy == 0 && options.on_new_arguments() == OnChange::error) {
    if (other != nullptr && same_arguments(other->guards, other->shape, request.guards, request.shape)) {
      other->holder->chain->check(other->layer, request.inputs);
    }
    throw UsageError(what +
                     ": an argument that is not a tensor has a new value, or autocast another state; set "
                     "GraphOptions::on_new_arguments to " +
                     "capture or eager, or pass it as a tensor");
  }
  if (busy == 0 && options.on_new_arguments() == OnChange::eager) {
    report_.eager_call();
    run_eagerly(site, request, outputs);
    return;
  }
  if (static_cast<std::int64_t>(site.variants.size() + recorded_.count(site)) >= options.max_captures()) {
    throw UsageError(what + ": it needs more than the " + std::to_string(options.max_captures()) +
                     " captures that GraphOptions::max_captures allows (" +
                     (busy > 0 ? "microbatches in flight" : "new argument values, shapes or gradient flags") +
                     "); raise it, or set on_new_arguments to eager");
  }
  record_and_run(site, request, outputs, busy);
}

}  // namespace sidestream
