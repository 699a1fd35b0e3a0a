#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/irange.h>
#include <torch/nn/module.h>

#include "graphs/capture/sequence_capture.h"
#include "graphs/gradients/gradient_leaves.h"
#include "graphs/gradients/gradient_policies.h"
#include "graphs/gradients/owned_gradients.h"
#include "offload/pinned_plan.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

std::uint64_t selected_bytes(const Profile& profile) {
  std::uint64_t bytes = 0;
  for (const StorageProfile& storage : profile.storages) {
    bytes += profile.groups[storage.savers.front()].selected && !storage.held_elsewhere ? storage.bytes : 0;
  }
  return bytes;
}

}  // namespace

SequenceCapture::SequenceCapture(CapturedSequence& sequence, const GraphResources& resources,
                                 std::vector<CallSpec> specs)
    : sequence_(sequence),
      resources_(resources),
      runtime_(*resources.runtime),
      order_(sequence.order),
      specs_(std::move(specs)),
      reads_(*resources.exclusions),
      use_(runtime_, *sequence.pool),
      lives_(specs_, order_, holders_, sequence.options.retain_graph_in_backward()),
      capture_(resources.capture_stream->get()),
      live_(specs_.size()) {
  register_holders();
}

void SequenceCapture::register_holders() {
  holders_.add([this](KnownReferences& references) {
    for (const CapturedCall& call : sequence_.calls) {
      call.tell(references);
    }
  });
  holders_.add([this](KnownReferences& references) {
    for (const Live& live : live_) {
      for (const std::vector<at::Tensor>* const tensors : {&live.leaves, &live.arguments, &live.outputs}) {
        for (const at::Tensor& tensor : *tensors) {
          references.add(tensor);
        }
      }
      if (live.recorder != nullptr) {
        for (const SavedIdentity& identity : live.recorder->identities()) {
          if (const auto saved = identity.saved.lock(); saved != nullptr) {
            references.add(*saved);
          }
        }
      }
    }
  });
}

CopyWindow SequenceCapture::window_for(const std::vector<std::uint64_t>& selected) const {
  if (resources_.room != CopyRoom::as_planned) {
    return CopyLimits::smallest(selected);
  }
  CopyLimits::Calls calls{sequence_.options.side_streams(), {}, resources_.link};
  for (const CallSizing& sizing : sizings_) {
    calls.paces.push_back(sizing.pace);
  }
  return resources_.eager->limits().for_calls(order_, selected, calls);
}

void SequenceCapture::make_plan_and_pin() {
  Profile& profile = sequence_.profile;
  std::vector<std::uint64_t> selected;
  for (const CallSizing& sizing : sizings_) {
    selected.push_back(selected_bytes(sizing.profile));
  }
  const CopyWindow window = window_for(selected);
  const std::vector<bool> staying = resources_.room == CopyRoom::none_stays
                                        ? std::vector<bool>(specs_.size())
                                        : needed_immediately(order_, selected, window);
  std::vector<std::size_t> first_storage;
  for (const auto i : c10::irange(specs_.size())) {
    const Profile& call = sizings_[i].profile;
    const auto offset = static_cast<std::uint32_t>(profile.groups.size());
    first_storage.push_back(profile.storages.size());
    for (GroupProfile group : call.groups) {
      group.needed_immediately = staying[i];
      profile.groups.push_back(std::move(group));
    }
    for (StorageProfile storage : call.storages) {
      for (std::uint32_t& saver : storage.savers) {
        saver += offset;
      }
      profile.storages.push_back(std::move(storage));
    }
  }
  if (sequence_.memory->shared()) {
    shared_slots_.emplace(sequence_.memory->slots(resources_.arena));
  }
  sequence_.plan = plan_and_pin(profile, *resources_.arena, HostArena::Surplus::kept, resources_.progress,
                                shared_slots_ ? &*shared_slots_ : nullptr);
  if (resources_.room != CopyRoom::as_planned) {
    sequence_.plan.notes.push_back(
        "device memory ran out while \"" + specs_.front().name +
        "\" and the calls after it were captured as planned. They were captured again so that at most " +
        std::to_string(window.lag) +
        " bytes of offloaded storages are on the device, beside what the running call saves" +
        (resources_.room == CopyRoom::none_stays ? "; groups that backward needs immediately are offloaded as well"
                                                 : ""));
  } else if (std::string note =
                 resources_.eager->limits().note(window, "the tensors that the largest graphed call saves");
             !note.empty()) {
    sequence_.plan.notes.push_back(std::move(note));
  }
  if (resources_.attempt != nullptr) {
    *resources_.attempt = {profile, sequence_.plan};
  }
  std::vector<std::uint64_t> offloaded;
  for (const auto i : c10::irange(specs_.size())) {
    const CallSizing& sizing = sizings_[i];
    live_[i].planned = lay_out(sizing.profile, sizing.scopes, sequence_.plan.decisions.data() + first_storage[i]);
    std::uint64_t bytes = 0;
    for (std::size_t s = 0; s < sizing.profile.storages.size(); ++s) {
      const bool is_offloaded = sequence_.plan.decisions[first_storage[i] + s].fate == Fate::offloaded;
      bytes += is_offloaded ? sizing.profile.storages[s].bytes : 0;
    }
    offloaded.push_back(bytes);
    if (!staying[i]) {
      selected[i] = bytes;  // bytes that stay for other reasons are in no copy's way
    }
  }
  copy_places_ = copy_places(order_, selected, offloaded, window);
}

void SequenceCapture::prepare_calls() {
  const at::NoGradGuard no_grad;
  const GradientPolicies policies(sequence_.options, resources_.model, specs_);
  sequence_.calls.resize(specs_.size());
  for (const auto i : c10::irange(specs_.size())) {
    CapturedCall& call = sequence_.calls[i];
    call.spec = specs_[i];
    call.site = call.spec.scope->site;
    call.forward.done = runtime_.create_external_event();
    call.backward.done = runtime_.create_external_event();
    call.copies.released_at = copy_places_[i].released_at;
    call.copies.reload_at = copy_places_[i].reload_at;
    call.reads.in_backward = sizings_[i].backward_reads;
    call.casts = sizings_[i].casts;
    take_facts(call);
    for (CallInput& input : call.spec.inputs) {
      StaticInput held;
      held.same_as_earlier = input.aliases && input.aliases->same_as != call.inputs.size();
      if (held.same_as_earlier) {
        held.tensor = call.inputs[input.aliases->same_as].tensor;
        held.requires_grad = call.inputs[input.aliases->same_as].requires_grad;
      } else if (!input.from && input.sample.defined()) {
        held.requires_grad = input.sample.requires_grad();
        held.tensor = at::empty_like(input.sample.detach(), c10::TensorOptions().device(runtime_.device()));
        held.tensor.copy_(input.sample.detach());
        reads_.made(held.tensor);
      }
      held.from = input.from;
      input.sample = at::Tensor();
      call.inputs.push_back(std::move(held));
    }
    specs_[i].inputs.clear();  // and with them the samples: the capture needs the memory
    for (const at::Tensor& parameter : sizings_[i].parameters) {
      CallParameter& held = call.parameters.emplace_back();
      held.tensor = parameter;
      held.policy = policies.of(call.spec, parameter);
      if (held.policy == GradientPolicy::accumulated) {
        const OwnedGradient owned = prepare_grad(call, parameter);
        held.grad = owned.memory;
        held.attached = owned.attached;
        call.accumulates = true;
      }
      watch(call, parameter);
    }
    for (const at::Tensor& leaf : sizings_[i].outside) {  // even if its gradient is none of the sequence's
      watch(call, leaf);
    }
  }
}

void SequenceCapture::take_facts(CapturedCall& call) {
  call.reads.modules = call.spec.state.modules.as_now(/*with_tensors=*/call.spec.module != nullptr);
  call.reads.modules.take_flags(call.spec.state.modules);
  for (TensorFacts& watched : call.reads.watched) {
    TensorFacts now(watched.tensor());
    now.expect_requires_grad(watched.requires_grad());
    watched = std::move(now);
  }
}

void SequenceCapture::watch(CapturedCall& call, const at::Tensor& tensor) {
  const auto is_it = [&](const TensorFacts& known) { return known.tensor().is_same(tensor); };
  const auto& registered = call.reads.modules.tensors();
  if (std::none_of(registered.begin(), registered.end(), is_it) &&
      std::none_of(call.reads.watched.begin(), call.reads.watched.end(), is_it)) {
    TensorFacts facts(tensor);
    const auto& recorded = call.spec.state.modules.tensors();
    if (const auto known = std::find_if(recorded.begin(), recorded.end(), is_it); known != recorded.end()) {
      facts.expect_requires_grad(known->requires_grad());
    }
    call.reads.watched.push_back(std::move(facts));
  }
}

OwnedGradient SequenceCapture::prepare_grad(const CapturedCall& call, const at::Tensor& parameter) {
  if (has_gradient_hooks(parameter)) {
    throw UsageError(
        "graphed call \"" + call.spec.name + "\": a parameter has gradient hooks, but a backward graph that " +
        "adds into .grad would not run them. Capture with another GradientPolicy than accumulated for this "
        "parameter (GraphOptions::gradients)");
  }
  return resources_.owned_gradients->of(parameter);
}

std::vector<at::Tensor> SequenceCapture::all_parameters() const {
  std::vector<at::Tensor> tensors;
  const auto add = [&](const at::Tensor& parameter) {
    if (!holds(tensors, parameter)) {
      tensors.push_back(parameter);
    }
  };
  for (const CapturedCall& call : sequence_.calls) {
    for (const CallParameter& parameter : call.parameters) {
      add(parameter.tensor);
    }
    if (call.spec.module != nullptr) {
      for (const at::Tensor& parameter : call.spec.module->parameters()) {
        add(parameter);
      }
    }
  }
  return tensors;
}

}  // namespace sidestream
