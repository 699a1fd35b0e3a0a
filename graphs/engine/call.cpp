#include "sidestream/call.h"

#include <ATen/core/grad_mode.h>

#include "graphs/engine/engine_state.h"
#include "sidestream/error.h"

namespace sidestream {
namespace detail {

bool step_active() noexcept { return EngineState::active() != nullptr; }

void dispatch(CallRequest& request, TensorBuffer& outputs) { EngineState::active()->dispatch(request, outputs); }

}  // namespace detail

CallSite& EngineState::site_for(const detail::CallRequest& request) {
  const void* key = request.module != nullptr ? static_cast<const void*>(request.module) : request.name;
  if (const auto found = sites_by_key_.find(key); found != sites_by_key_.end()) {
    if (request.module != nullptr || found->second->scope->name == request.name) {
      return *found->second;
    }
  }
  std::string name;
  std::shared_ptr<const torch::nn::Module> module;
  if (request.module != nullptr) {
    auto known = names_.find(request.module);
    if (known == names_.end()) {
      learn_names();
      known = names_.find(request.module);
    }
    if (known == names_.end()) {
      throw UsageError(
          "ss::call: the module \"" + request.module->name() +
          "\" is not part of the model that the engine was made with; register it there, or make the engine anew");
    }
    name = known->second.first;
    module = known->second.second;
  } else {
    name = request.name;
  }
  ScopeNode* scope = tree_.child(tree_.root(), name);
  for (CallSite& site : sites_) {
    if (site.scope == scope && site.module == module) {
      sites_by_key_[key] = &site;
      return site;
    }
  }
  CallSite& site = sites_.emplace_back();
  site.scope = scope;
  site.module = std::move(module);
  site.graphed = graphed_.matches(name);
  sites_by_key_[key] = &site;
  return site;
}

void EngineState::run_eagerly(CallSite& site, detail::CallRequest& request, detail::TensorBuffer& outputs) {
  if (Recorder* recorder = current_recorder(); recorder != nullptr) {
    const RecorderScope scope(*recorder, site.scope);
    request.run(request.context, outputs);
  } else {
    request.run(request.context, outputs);
  }
}

void EngineState::dispatch(detail::CallRequest& request, detail::TensorBuffer& outputs) {
  CallSite& site = site_for(request);
  const bool may_be_graphed = site.graphed && !capturing_ && !inside_graphed_call_;
  if (!may_be_graphed || !at::GradMode::is_enabled() || (site.module != nullptr && !site.module->is_training())) {
    step_.eager_calls += may_be_graphed ? 1 : 0;
    run_eagerly(site, request, outputs);
  } else if (sized_) {
    replay_or_record(site, request, outputs);
  } else {
    record_and_run(site, request, outputs, 0);
  }
}

void EngineState::record_and_run(CallSite& site, detail::CallRequest& request, detail::TensorBuffer& outputs,
                                 std::size_t busy) {
  struct Inside {
    bool& flag;
    ~Inside() { flag = false; }
  };
  const std::size_t call = recorded_.add(site, request, AutocastState::current(runtime_->device().type()), busy);
  {
    inside_graphed_call_ = true;
    const Inside inside{inside_graphed_call_};
    try {
      run_eagerly(site, request, outputs);
    } catch (...) {
      recorded_.forget(call);
      throw;
    }
  }
  recorded_.ran(call, outputs);
  step_.eager_calls += 1;
}

void EngineState::replay_or_record(CallSite& site, detail::CallRequest& request, detail::TensorBuffer& outputs) {
  const AutocastState autocast = AutocastState::current(runtime_->device().type());
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
  const GraphOptions& options = options_.graph_options();
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
    step_.eager_calls += 1;
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
