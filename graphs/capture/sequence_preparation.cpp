#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/StringUtil.h>
#include <c10/util/irange.h>
#include <torch/nn/module.h>

#include "graphs/capture/sequence_capture.h"
#include "graphs/gradients/call_gradients.h"
#include "graphs/gradients/gradient_leaves.h"
#include "offload/pinned_plan.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

std::uint64_t selected_bytes(const Profile& profile) {
  std::uint64_t bytes = 0;
  for (const StorageProfile& storage : profile.storages) {
    const bool stays = storage.held_elsewhere || storage.marked;
    bytes += profile.groups[storage.savers.front()].selected && !stays ? storage.bytes : 0;
  }
  return bytes;
}

/// For calls that save `selected` bytes.
CopyWindow window_for(const SequenceCapture& capture, const std::vector<std::uint64_t>& selected) {
  if (capture.resources.room != GraphResources::CopyRoom::as_planned) {
    return CopyLimits::smallest(selected);
  }
  if (const auto& room = capture.resources.room_in_budget) {
    CopyWindow window = CopyLimits::smallest(selected);
    window.lag = std::max(window.lag, *room);
    return window;
  }
  CopyLimits::Calls calls{capture.sequence.options.side_streams(), {}, capture.resources.link};
  for (const CallSizing& sizing : capture.sizings) {
    calls.paces.push_back(sizing.pace);
  }
  return capture.resources.eager->limits().for_calls(capture.order, selected, calls);
}

/// For former_runs: calls that are offloaded alike. Only in an order in which one call may follow the other's backward.
std::vector<std::size_t> kinds_of_calls(const SequenceCapture& capture, const std::vector<bool>& staying) {
  const auto alike = [&](std::size_t a, std::size_t b) {
    const std::vector<StorageProfile>& of_a = capture.sizings[a].profile.storages;
    const std::vector<StorageProfile>& of_b = capture.sizings[b].profile.storages;
    return capture.specs[a].scope == capture.specs[b].scope && staying[a] == staying[b] &&
           std::equal(of_a.begin(), of_a.end(), of_b.begin(), of_b.end(),
                      [](const StorageProfile& one, const StorageProfile& other) {
                        return one.bytes == other.bytes && one.savers == other.savers &&
                               one.held_elsewhere == other.held_elsewhere && one.static_output == other.static_output &&
                               one.for_weights == other.for_weights && one.marked == other.marked;
                      });
  };
  std::vector<std::size_t> kinds;
  for (const auto i : c10::irange(capture.specs.size())) {
    std::size_t first = 0;
    while (first < i && !(capture.order.interleaves() && kinds[first] == first && alike(first, i))) {
      ++first;
    }
    kinds.push_back(first);
  }
  return kinds;
}

/// Of an accumulated gradient: the `.grad` that the backward graph adds into.
OwnedGradient prepare_grad(OwnedGradients& gradients, const CapturedCall& call, const at::Tensor& parameter) {
  if (has_gradient_hooks(parameter)) {
    throw UsageError("graphed call \"" + call.spec.name + "\": a parameter of shape " + c10::str(parameter.sizes()) +
                     " has gradient hooks, but a backward graph that adds into .grad would not run them. Capture with "
                     "another GradientPolicy than accumulated for this parameter (GraphOptions::gradients)");
  }
  return gradients.of(parameter);
}

}  // namespace

std::vector<CopyPlaces> make_plan_and_pin(SequenceCapture& capture) {
  Profile& profile = capture.sequence.profile;
  std::vector<std::uint64_t> selected;
  for (const CallSizing& sizing : capture.sizings) {
    selected.push_back(selected_bytes(sizing.profile));
  }
  const CopyWindow window = window_for(capture, selected);
  const bool none_stays =
      capture.resources.room == GraphResources::CopyRoom::none_stays || capture.resources.room_in_budget == 0;
  const std::vector<bool> staying =
      none_stays ? std::vector<bool>(capture.specs.size()) : needed_immediately(capture.order, selected, window);
  capture.sequence.selected = selected;
  std::vector<std::size_t> first_storage;
  std::vector<bool> for_weights;
  for (const CallSizing& sizing : capture.sizings) {
    for_weights.push_back(std::any_of(sizing.profile.storages.begin(), sizing.profile.storages.end(),
                                      [](const StorageProfile& storage) { return storage.for_weights; }));
  }
  capture.former = former_runs(capture.order, kinds_of_calls(capture, staying), for_weights);
  for (const CallSizing& sizing : capture.sizings) {
    profile.staying.insert(profile.staying.end(), sizing.profile.staying.begin(), sizing.profile.staying.end());
  }
  for (const auto i : c10::irange(capture.specs.size())) {
    if (capture.former[i] != i) {  // it is offloaded as that call is, to the same place
      first_storage.push_back(first_storage[capture.former[i]]);
      for (std::size_t s = 0; s < capture.sizings[i].profile.storages.size(); ++s) {
        ++profile.storages[first_storage[i] + s].runs;
      }
      continue;
    }
    const Profile& call = capture.sizings[i].profile;
    const auto offset = static_cast<std::uint32_t>(profile.groups.size());
    first_storage.push_back(profile.storages.size());
    profile.budgets = call.budgets;  // the same of each call
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
  if (capture.sequence.memory->shared()) {
    capture.shared_slots.emplace(capture.sequence.memory->slots(capture.resources.arena));
  }
  capture.sequence.plan =
      plan_and_pin(profile, *capture.resources.arena, HostArena::Surplus::kept, capture.resources.progress,
                   capture.shared_slots ? &*capture.shared_slots : nullptr);
  if (capture.resources.room != GraphResources::CopyRoom::as_planned) {
    capture.sequence.plan.notes.push_back(
        "device memory ran out while \"" + capture.specs.front().name +
        "\" and the calls after it were captured as planned. They were captured again so that at most " +
        std::to_string(window.lag) +
        " bytes of offloaded storages are on the device, beside what the running call saves" +
        (capture.resources.room == GraphResources::CopyRoom::none_stays
             ? "; groups that backward needs immediately are offloaded as well"
             : ""));
  } else if (std::string note =
                 capture.resources.eager->limits().note(window, "the tensors that the largest graphed call saves");
             !note.empty()) {
    capture.sequence.plan.notes.push_back(std::move(note));
  }
  if (capture.resources.attempt != nullptr) {
    *capture.resources.attempt = {profile, capture.sequence.plan};
  }
  std::vector<std::uint64_t> offloaded;
  for (const auto i : c10::irange(capture.specs.size())) {
    const CallSizing& sizing = capture.sizings[i];
    capture.live[i].planned =
        lay_out(sizing.profile, sizing.scopes, capture.sequence.plan.decisions.data() + first_storage[i]);
    std::uint64_t bytes = 0;
    for (std::size_t s = 0; s < sizing.profile.storages.size(); ++s) {
      const bool is_offloaded = capture.sequence.plan.decisions[first_storage[i] + s].fate == Fate::offloaded;
      bytes += is_offloaded ? sizing.profile.storages[s].bytes : 0;
    }
    offloaded.push_back(bytes);
    if (!staying[i]) {
      selected[i] = bytes;  // bytes that stay for other reasons are in no copy's way
    }
  }
  return copy_places(capture.order, selected, offloaded, window);
}

void prepare_calls(SequenceCapture& capture, const std::vector<CopyPlaces>& places) {
  const at::NoGradGuard no_grad;
  capture.sequence.calls.resize(capture.specs.size());
  for (const auto i : c10::irange(capture.specs.size())) {
    CapturedCall& call = capture.sequence.calls[i];
    call.spec = capture.specs[i];
    call.site = call.spec.scope->site;
    call.forward.done = capture.runtime.create_external_event();
    call.backward.done = capture.runtime.create_external_event();
    call.weights.done = capture.runtime.create_external_event();
    call.copies.released_at = places[i].released_at;
    call.copies.reload_at = places[i].reload_at;
    call.reads.in_backward = capture.sizings[i].backward_reads;
    call.casts = capture.sizings[i].casts;
    take_facts(call);
    for (CallInput& input : call.spec.inputs) {
      StaticInput held;
      held.same_as_earlier = input.aliases && input.aliases->same_as != call.inputs.size();
      if (held.same_as_earlier) {
        held.tensor = call.inputs[input.aliases->same_as].tensor;
        held.requires_grad = call.inputs[input.aliases->same_as].requires_grad;
      } else if (!input.from && input.sample.defined()) {
        held.requires_grad = input.sample.requires_grad();
        held.in_pool = capture.order.interleaves() && !input.is_static;
        const c10::Device device = held.in_pool ? c10::Device(c10::kMeta) : capture.runtime.device();
        held.tensor = input.is_static ? input.sample.detach()
                                      : at::empty_like(input.sample.detach(), c10::TensorOptions().device(device));
        if (!held.in_pool) {
          if (!input.is_static) {
            held.tensor.copy_(input.sample.detach());
          }
          capture.reads.made(held.tensor);
        }
      }
      held.from = input.from;
      input.sample = at::Tensor();
      call.inputs.push_back(std::move(held));
    }
    capture.specs[i].inputs.clear();  // and with them the samples: the capture needs the memory
    for (const at::Tensor& parameter : capture.sizings[i].parameters) {
      CallParameter& held = call.parameters.emplace_back();
      held.tensor = parameter;
      held.policy = capture.policy_of(call.spec, parameter);
      call.delays = call.delays || held.policy == GradientPolicy::delayed;
      if (held.policy == GradientPolicy::accumulated) {
        const OwnedGradient owned = prepare_grad(*capture.resources.owned_gradients, call, parameter);
        held.grad = owned.memory;
        held.attached = owned.attached;
        call.accumulates = true;
      }
      watch_tensor(call, parameter);
    }
    for (const at::Tensor& leaf : capture.sizings[i].outside) {  // even if its gradient is none of the sequence's
      watch_tensor(call, leaf);
    }
  }
}

void take_facts(CapturedCall& call) {
  call.reads.modules = call.spec.state.modules.as_now(/*with_tensors=*/call.spec.module != nullptr);
  call.reads.modules.take_flags(call.spec.state.modules);
  for (TensorFacts& watched : call.reads.watched) {
    TensorFacts now(watched.tensor());
    now.expect_requires_grad(watched.requires_grad());
    watched = std::move(now);
  }
}

void watch_tensor(CapturedCall& call, const at::Tensor& tensor) {
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

void hold_reads(CaptureReads& reads, CapturedCall& call) {
  for (const at::Tensor& tensor : reads.give_to(call)) {
    watch_tensor(call, tensor);
  }
}

std::vector<at::Tensor> all_parameters(const CapturedSequence& sequence) {
  std::vector<at::Tensor> tensors;
  const auto add = [&](const at::Tensor& parameter) {
    if (!holds(tensors, parameter)) {
      tensors.push_back(parameter);
    }
  };
  for (const CapturedCall& call : sequence.calls) {
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
