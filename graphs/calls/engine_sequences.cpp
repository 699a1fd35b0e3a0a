#include "graphs/calls/engine_sequences.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include <ATen/ops/zeros_like.h>
#include <torch/nn/module.h>

#include "graphs/calls/call_table.h"
#include "graphs/calls/engine_counts.h"
#include "graphs/calls/memory_shortage.h"
#include "graphs/calls/recorded_calls.h"
#include "graphs/guards/call_modes.h"
#include "graphs/resources/call_context.h"
#include "graphs/resources/eager_plan.h"
#include "graphs/resources/engine_resources.h"
#include "observe/sync_finder.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// Dropped by a capture that failed in its place, or captured of a model that is another now.
bool is_outdated(const GraphSequence& sequence) {
  const CapturedCalls& calls = sequence.captured().calls;
  return sequence.captured().change().stale() || std::any_of(calls.begin(), calls.end(), [](const CapturedCall& call) {
           return !call.forward.graph && !call.replay.released;
         });
}

/// True if a call would still have more captures than its bound: a pending backward prevented a drop.
bool exceeds_bound(const RecordedCalls& recorded) {
  return std::any_of(recorded.calls().begin(), recorded.calls().end(), [&](const auto& call) {
    const CallSite& site = *call->site;
    const bool gradients = call->state.modes.gradients;
    return site.rules.on_max_captures == OnMaxCaptures::drop_least_used &&
           site.variants.count(gradients) + recorded.count(site, gradients) >
               static_cast<std::size_t>(site.rules.max_captures);
  });
}

}  // namespace

void EngineSequences::check_capture(const GraphOptions& options) const {
  if (context_.phase() == CallContext::Phase::capturing) {
    throw UsageError(
        "make_graphed_callables was called inside a capture of the same engine (from a hook, from Options::progress, "
        "or from the body of a call); call it before or after the capture");
  }
  check_graph_options(options, resources_.runtime->current_stream());
}

std::shared_ptr<GraphSequence> EngineSequences::capture_sequence(const std::vector<CallSpec>& specs,
                                                                 SequenceOrder order, const GraphOptions& options,
                                                                 const std::shared_ptr<GraphMemory>& memory) {
  check_capture(options);
  const SyncFinder::Pause captures;
  SyncFinder::unsettle();
  const CaptureModesGuard modes(resources_.runtime->device().type());
  const CallContext::OnThread on_thread(context_);
  const CallContext::Enter capturing(context_, CallContext::Phase::capturing);
  std::optional<OperatorObserverGuard> journaling;
  resources_.check.journal_capture(journaling, counts_.report.steps);
  std::shared_ptr<GraphSequence> sequence = capture_that_fits(
      resources_, all_, [this] { mark_static_outputs(); }, specs, order, options, memory);
  counts_.captured(*sequence);
  plan_.outdate();
  return sequence;
}

std::shared_ptr<SequenceHolder> EngineSequences::capture(const std::vector<CallSpec>& specs, SequenceOrder order,
                                                         const GraphOptions& options,
                                                         const std::shared_ptr<GraphMemory>& memory) {
  const auto holder = std::make_shared<SequenceHolder>();
  holder->sequence = capture_sequence(specs, std::move(order), options, memory);
  std::erase_if(all_, [](const auto& gone) { return gone.expired(); });
  all_.push_back(holder);
  mark_static_outputs();
  return holder;
}

void EngineSequences::recapture(SequenceHolder& holder) {
  check_capture(holder.captured().options);
  holder.captured().memory->check_capture(holder.sequence.get());
  const CaptureModesGuard modes(resources_.runtime->device().type());
  const CapturedCalls& calls = holder.captured().calls;
  std::vector<CallSpec> specs;
  std::vector<std::size_t> index(calls.size());  // of each call now, among those that are left
  std::vector<bool> dropped(calls.size());
  for (std::size_t l = 0; l < calls.size(); ++l) {
    const CapturedCall& call = calls[l];
    index[l] = specs.size();
    dropped[l] = call.replay.released;
    if (dropped[l]) {
      continue;
    }
    CallSpec spec = call.spec;
    spec.state.modules = call.spec.state.modules.as_now();
    for (std::size_t i = 0; i < spec.inputs.size(); ++i) {
      const StaticInput& held = call.inputs[i];
      if (!held.from && !held.same_as_earlier && held.tensor.defined()) {
        // The new graphs read the old ones' inputs where they are. Inputs in the pool are on the device in the warm-up only.
        spec.inputs[i].on_host = held.in_pool;
        spec.inputs[i].is_static = !held.in_pool;
        const at::Tensor sample = held.in_pool ? at::zeros_like(held.tensor, c10::kCPU) : held.tensor.detach();
        spec.inputs[i].sample = sample.requires_grad_(held.requires_grad);
      }
      std::optional<Link>& from = spec.inputs[i].from;
      if (from && !calls[from->call].replay.released) {
        from->call = index[from->call];
      } else if (from) {  // the memory that the input was linked to may hold anything
        from.reset();
        if (held.tensor.defined()) {
          spec.inputs[i].sample = at::zeros_like(held.tensor).requires_grad_(held.requires_grad);
        }
      }
    }
    specs.push_back(std::move(spec));
  }
  const GraphOptions options = holder.captured().options;
  SequenceOrder order = holder.captured().order.without(dropped);
  const std::shared_ptr<GraphMemory> memory = holder.captured().memory;
  holder.sequence->reset();
  resources_.runtime->release_cached_memory();  // the old pool goes before the new one is made
  holder.sequence = capture_sequence(specs, std::move(order), options, memory->shared() ? memory : nullptr);
  holder.switched = false;
  if (specs.size() < index.size()) {
    if (holder.indices.empty()) {
      holder.indices = index;
    } else {
      for (std::size_t& now : holder.indices) {
        now = now < index.size() ? index[now] : specs.size();  // else dropped before
      }
    }
  }
  counts_.report.recaptures += static_cast<std::int64_t>(holder.captured().calls.size());
  mark_static_outputs();
}

void EngineSequences::capture_recorded(RecordedCalls& recorded) {
  if (recorded.empty()) {
    return;
  }
  if (recorded.outdated()) {
    for (const auto& call : recorded.calls()) {
      call->site->to_record = true;
    }
    recorded.clear();
    return;
  }
  if (exceeds_bound(recorded)) {  // they run eagerly, and are recorded again
    recorded.clear();
    return;
  }
  recorded.learn_backward_modes();
  std::size_t slots = 0;
  for (const auto& call : recorded.calls()) {
    slots = std::max(slots, call->slot + 1);
  }
  for (auto in_order = recorded.in_order(); !in_order.empty(); in_order = recorded.in_order()) {
    capture_group(recorded, in_order, recorded.order_of(in_order), 0, false);
    own_.back()->order = recorded.calls()[in_order.front()]->order;
  }
  for (const bool evaluation : {false, true}) {  // the larger ones first
    for (std::size_t slot = 0; slot < slots; ++slot) {
      for (const std::vector<std::size_t>& group : recorded.groups(slot, evaluation)) {
        capture_group(recorded, group, nested_order(group.size()), slot, evaluation);
      }
    }
  }
  recorded.clear();
  resources_.runtime->release_cached_memory();
}

void EngineSequences::capture_group(RecordedCalls& recorded, const std::vector<std::size_t>& group, SequenceOrder order,
                                    std::size_t slot, bool evaluation) {
  std::vector<const CallSite*> sites;
  for (const std::size_t recorded_call : group) {
    sites.push_back(recorded.calls()[recorded_call]->site);
  }
  std::vector<CallSpec> specs = recorded.specs_of(group);
  const std::vector<bool> without_backward = recorded.without_backward();
  for (std::size_t i = 0; i < group.size(); ++i) {
    specs[i].outputs_released = recorded.outputs().released(group[i], plan_);
    specs[i].may_lack_backward = without_backward[group[i]];
  }
  const auto holder =
      capture(specs, std::move(order), resources_.options.graph_options(), memory_of(sites, slot, evaluation));
  for (std::size_t i = 0; i < group.size(); ++i) {
    RecordedCall& call = *recorded.calls()[group[i]];
    call.captured = true;
    call.site->variants.add({holder, i, call.guards, call.shape, call.structure, call.slot, call.stage,
                             recorded.continues(group[i], group)});
    call.site->to_record = false;
    counts_.report.recaptures += std::exchange(call.site->captured_before, true) ? 1 : 0;
    recorded.outputs().for_each_of(group[i], [&](const c10::StorageImpl* storage, std::size_t output) {
      const CapturedCall& captured = holder->captured().calls[i];
      if (output < captured.outputs.size() && captured.outputs[output].kind == StaticOutput::Kind::made) {
        plan_.captured(storage, captured.output_storages[captured.outputs[output].of].given_back());
      }
    });
  }
  own_.push_back(holder);
}

std::shared_ptr<GraphMemory> EngineSequences::memory_of(const std::vector<const CallSite*>& sites, std::size_t slot,
                                                        bool evaluation) {
  const CallOptions& options = resources_.options.call_options();
  const bool all = options.share_memory();
  const std::size_t of = evaluation ? 0 : slot;
  const bool with_forwards = of == 0 && options.on_evaluation() == OnEvaluation::capture;
  if (resources_.options.graph_options().pool() != nullptr || !(all || with_forwards)) {
    return nullptr;
  }
  std::shared_ptr<GraphMemory> memory;
  for (const CallSite* const site : sites) {
    if (const auto known = memories_.find({site, of}); memory == nullptr && known != memories_.end()) {
      memory = known->second;
    }
  }
  if (memory == nullptr) {
    memory = std::make_shared<GraphMemory>(GraphMemory::Use::shared);
  }
  for (const CallSite* const site : sites) {
    memories_.try_emplace({site, of}, memory);
  }
  const bool taken = !all && !evaluation && std::any_of(own_.begin(), own_.end(), [&](const auto& holder) {
    return holder->captured().memory == memory && !holder->captured().forwards_alone();
  });
  return taken || memory->pending_beside(nullptr) ? nullptr : memory;
}

void EngineSequences::drop_least_used(CallTable& calls, const RecordedCalls& recorded) {
  if (recorded.empty() || recorded.outdated()) {
    return;
  }
  bool dropped = false;
  for (CallSite& site : calls.sites()) {
    if (site.rules.on_max_captures != OnMaxCaptures::drop_least_used) {
      continue;
    }
    for (const bool gradients : {true, false}) {
      const std::size_t more = recorded.count(site, gradients);
      while (const CallVariant* const least = site.variants.to_drop(gradients, more, site.rules)) {
        site.variants.drop(*least);
        dropped = true;
      }
    }
  }
  if (dropped) {
    std::erase_if(own_, [](const auto& holder) { return holder->captured().released(); });
    mark_static_outputs();
  }
}

bool EngineSequences::needs_memory_in_use() const {
  const std::shared_ptr<GraphPool>& pool = resources_.options.graph_options().pool();
  return (pool != nullptr && GraphMemory::of(*pool, resources_.runtime->device())->pending_beside(nullptr)) ||
         std::any_of(own_.begin(), own_.end(), [](const auto& holder) {
           return is_outdated(*holder->sequence) && holder->captured().memory->pending_beside(holder->sequence.get());
         });
}

bool EngineSequences::agree(bool mine) {
  const bool waits = mine && needs_memory_in_use();
  const bool agreed = agree_to_capture(resources_.options.graph_options(), mine && !waits) && !waits;
  postponed_.reset();
  if (mine && !agreed) {
    postponed_ = waits ? EagerCause::shared_memory : EagerCause::not_agreed;
  }
  return agreed;
}

void EngineSequences::await_failed_backward() const {
  const auto bound = std::chrono::steady_clock::now() + PendingBackwards::kEndOfFailed;
  for_each([&](const GraphSequence& sequence) { sequence.pending().await_none(bound); });
}

bool EngineSequences::outdated() const {
  return std::any_of(own_.begin(), own_.end(), [](const auto& holder) { return is_outdated(*holder->sequence); });
}

void EngineSequences::follow_weights(CallTable& calls) {
  std::vector<std::shared_ptr<SequenceHolder>> replaced;
  for (const auto& holder : own_) {
    const FactsChange change = holder->captured().change();
    if (!is_outdated(*holder->sequence)) {
      continue;
    }
    if (resources_.options.graph_options().on_relocated_weights() == OnRelocatedWeights::error) {
      throw UsageError(
          holder->captured().describe(0) +
          ", or a call that was captured with it: parameters or buffers were relocated or replaced since the capture "
          "(load, Module::to); call OffloadEngine::reset, or set GraphOptions::on_relocated_weights to capture");
    }
    if (change.stale() && !change.only_relocated()) {
      holder->sequence->reset();
      calls.drop_variants_of(*holder);
      replaced.push_back(holder);
    } else {
      recapture(*holder);
    }
  }
  for (const auto& holder : replaced) {
    own_.erase(std::remove(own_.begin(), own_.end(), holder), own_.end());
  }
  if (!replaced.empty()) {
    resources_.owned_gradients.renew_accumulators();
    resources_.learn_registered();
    mark_static_outputs();
  }
}

void EngineSequences::recapture_calls() {
  for (const auto& holder : own_) {
    recapture(*holder);
  }
}

void EngineSequences::reset_calls() {
  for (const auto& holder : own_) {
    holder->sequence->reset();
  }
}

std::vector<const GraphSequence*> EngineSequences::of_calls() const {
  std::vector<const GraphSequence*> sequences;
  for (const auto& holder : own_) {
    sequences.push_back(holder->sequence.get());
  }
  return sequences;
}

void EngineSequences::drop_own() {
  reset_calls();
  own_.clear();
  memories_.clear();
}

void EngineSequences::offload_switched() const {
  for (const auto& weak : all_) {
    if (const auto holder = weak.lock()) {
      holder->switched = true;
    }
  }
}

void EngineSequences::mark_static_outputs() {
  resources_.exclusions.remove_static_inputs();
  for_each([&](const GraphSequence& sequence) {
    for (const CapturedCall& call : sequence.captured().calls) {
      for (const StaticOutput& output : call.outputs) {
        if (output.tensor.defined()) {
          resources_.exclusions.add_static_input(output.tensor);
        }
      }
    }
  });
}

}  // namespace sidestream
