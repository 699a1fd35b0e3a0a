#include <memory>
#include <string>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/irange.h>

#include "base/site.h"
#include "graphs/capture/body_hooks.h"
#include "graphs/capture/captured_outputs.h"
#include "graphs/capture/eager_pass.h"
#include "graphs/capture/graph_check.h"
#include "graphs/capture/node_naming.h"
#include "graphs/capture/sequence_capture.h"
#include "graphs/guards/call_spec.h"
#include "graphs/guards/call_state.h"
#include "runtime/capture_guard.h"

namespace sidestream {

void SequenceCapture::capture_forward(std::size_t index) {
  CapturedCall& call = sequence_.calls[index];
  Live& live = live_[index];
  use_.comes_to(order_.forward_index(index));
  release(order_.forward_index(index));
  const Site site(Activity::capture_forward, call.spec.scope->site);
  make_leaves(index);
  live.recorder = std::make_unique<SavedTensorRecorder>(*resources_.tree, *resources_.exclusions, resources_.offload,
                                                        &live.planned);
  detail::TensorBuffer outputs;
  SavedStorages saved(*live.recorder);
  const PassHooks hooks(call.spec.hooks.get(), reads_.met());
  hooks.before_forward();
  if (call.spec.hooks != nullptr) {
    take_facts(call);
  }
  resources_.offload->begin_forward(call.copies.captured, shared_slots_ ? &*shared_slots_ : nullptr);
  use_.capture_begins();
  CaptureGuard capture(runtime_, capture_, *sequence_.pool, call.spec.generators);
  NodeNaming naming(runtime_, capture_, call.forward.names, *live.recorder, live.scopes);
  {
    const OperatorObserverGuard observer = reads_.watch();
    const OperatorObserverGuard names = naming.watch();
    {
      const RecorderGuard recording(live.recorder.get());
      RecorderScope scope(*live.recorder, call.spec.scope);
      {
        const ForwardStateGuard state(call.spec.state);
        live.arguments = arguments_of(call.spec, live.leaves);
        const SavedTensorGuard noting(&saved);
        call.spec.body(live.arguments.data(), outputs);
      }
      scope.end();
    }
    names.rethrow();
    observer.rethrow();
  }
  hold_reads(call);
  reads_.forward_ended(index);
  live.recorder->finish();
  const SavedTensorRecorder::Counts counts = live.recorder->counts();
  call.unplanned_bytes = counts.unplanned_bytes;
  call.refused_bytes = counts.refused_bytes;
  runtime_.record(call.forward.done, capture_);
  record_caller_event();
  resources_.offload->end_forward();
  call.forward.graph = capture.end();
  use_.capture_ended();
  hooks.after_forward();
  std::vector<const ExternalEvent*> ready;
  for (const CapturedCopies::Group& group : call.copies.captured.groups) {
    for (const ExternalEvent& event : group.ready) {
      ready.push_back(&event);
    }
  }
  const std::string what = sequence_.describe(index) + ", forward";
  const std::vector<GraphNode> nodes = runtime_.nodes(call.forward.graph);
  check_graph_events(nodes, call.forward.names, call.forward.done, ready, what);
  check_nodes(nodes, call.forward.names, call.copies.captured, what);
  check_copy_ends(call.copies.captured, CopyEnds::sources, what);
  live.outputs.assign(outputs.begin(), outputs.end());
  learn_outputs(call, live.arguments, outputs, saved, *resources_.exclusions);
  learn_lives(index, saved);
  live.arguments.clear();
  if (has_hooks_of_body(outputs)) {
    sequence_.plan.notes.push_back(
        sequence_.describe(index) +
        " registers gradient hooks inside: replays repeat their tensor operations only; other "
        "effects of the hooks happen at the capture only");
  }
  history_.add(sequence_.describe(index), live.leaves, all_parameters(), outputs);
}

void SequenceCapture::learn_lives(std::size_t index, const SavedStorages& saved) {
  const CapturedCall& call = sequence_.calls[index];
  lives_.forward_captured({call.outputs, call.output_storages},
                          {saved, *live_[index].recorder, sizings_[index].outputs.kept, call.copies.released_at});
}

void SequenceCapture::release(std::size_t graph_index) {
  for (const CapturedCall& call : sequence_.calls) {
    if (call.copies.released_at == graph_index) {
      CaptureOffload::release(call.copies.captured);
    }
  }
  for (const Link& output : lives_.ended_before(graph_index)) {
    sequence_.calls[output.call].output_storages[output.index].give_back_to(sequence_.pool);
    sequence_.released_outputs.push_back({graph_index, output});
  }
}

void SequenceCapture::share_outputs() {
  for (const auto call : c10::irange(sequence_.calls.size())) {
    std::vector<OutputStorage>& storages = sequence_.calls[call].output_storages;
    for (const auto index : c10::irange(storages.size())) {
      if (!storages[index].given_back()) {
        storages[index].give_back_to(sequence_.pool);
        sequence_.released_outputs.push_back({order_.size(), {call, index}});  // after the last graph of this sequence
      }
    }
  }
}

void SequenceCapture::make_leaves(std::size_t index) {
  CapturedCall& call = sequence_.calls[index];
  Live& live = live_[index];
  for (const auto i : c10::irange(call.inputs.size())) {
    StaticInput& input = call.inputs[i];
    if (input.same_as_earlier) {
      const StaticInput& first = call.inputs[call.spec.inputs[i].aliases->same_as];
      input.tensor = first.tensor;
      input.from = first.from;
      input.requires_grad = first.requires_grad;
    } else if (input.from) {
      link(input, {index, i});
    }
    if (input.same_as_earlier) {
      live.leaves.push_back(live.leaves[call.spec.inputs[i].aliases->same_as]);
    } else {
      live.leaves.push_back(input.tensor.defined() ? input.tensor.detach().requires_grad_(input.requires_grad)
                                                   : input.tensor);
    }
    if (input.tensor.defined() && (!input.from || sequence_.options.retain_graph_in_backward())) {
      resources_.exclusions->add_static_input(input.tensor);
    }
  }
}

void SequenceCapture::link(StaticInput& input, const Link& reader) {
  using Kind = StaticOutput::Kind;
  for (;;) {
    CapturedCall& giver = sequence_.calls[input.from->call];
    StaticOutput& output = giver.outputs[input.from->index];
    if (output.kind == Kind::earlier_output) {
      input.from->index = output.of;
    } else if (output.kind == Kind::input && giver.inputs[output.of].from) {
      input.from = giver.inputs[output.of].from;
    } else if (output.kind == Kind::none || output.kind == Kind::made) {
      output.readers.push_back(reader);
      input.tensor = output.tensor;
      input.requires_grad = output.requires_grad;
      return;
    } else {  // what a replay is given there is the caller's own, wherever it lies
      const at::NoGradGuard no_grad;
      const bool of_input = output.kind == Kind::input || output.kind == Kind::view_of_input;
      input.requires_grad = of_input ? giver.inputs[output.of].requires_grad : output.owner.requires_grad();
      input.tensor = at::empty_like(output.tensor).copy_(output.tensor);
      reads_.made(input.tensor);
      input.from.reset();
      return;
    }
  }
}

}  // namespace sidestream
