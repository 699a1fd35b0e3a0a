#include <memory>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>
#include <c10/util/irange.h>

#include "base/site.h"
#include "graphs/capture/body_hooks.h"
#include "graphs/capture/node_naming.h"
#include "graphs/capture/sequence_capture.h"
#include "graphs/capture/warmup.h"
#include "graphs/guards/call_spec.h"
#include "runtime/capture_guard.h"

namespace sidestream {

namespace {

/// Lets an input that is another call's output read that output's memory, if that call makes the output at each replay.
void link_input(SequenceCapture& capture, StaticInput& input, const Link& reader) {
  using Kind = StaticOutput::Kind;
  for (;;) {
    CapturedCall& giver = capture.sequence.calls[input.from->call];
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
      capture.reads.made(input.tensor);
      input.from.reset();
      return;
    }
  }
}

/// Makes the static inputs as the body gets them; links those that are outputs of earlier calls.
void make_leaves(SequenceCapture& capture, std::size_t index) {
  CapturedCall& call = capture.sequence.calls[index];
  SequenceCapture::Live& live = capture.live[index];
  for (const auto i : c10::irange(call.inputs.size())) {
    StaticInput& input = call.inputs[i];
    if (input.same_as_earlier) {
      const StaticInput& first = call.inputs[call.spec.inputs[i].aliases->same_as];
      input.tensor = first.tensor;
      input.from = first.from;
      input.requires_grad = first.requires_grad;
    } else if (input.from) {
      link_input(capture, input, {index, i});
    }
    if (input.in_pool) {
      live.leaves.emplace_back();
    } else if (input.same_as_earlier) {
      live.leaves.push_back(live.leaves[call.spec.inputs[i].aliases->same_as]);
    } else {
      live.leaves.push_back(input.tensor.defined() ? input.tensor.detach().requires_grad_(input.requires_grad)
                                                   : input.tensor);
    }
    if (call.spec.inputs[i].marked) {
      capture.resources.exclusions->mark(input.tensor);
    }
    if (input.tensor.defined() && !input.in_pool &&
        (!input.from || capture.sequence.options.retain_graph_in_backward())) {
      capture.resources.exclusions->add_static_input(input.tensor);
    }
  }
}

/// Inside of the capture: makes the static inputs that are memory of the pool.
void make_leaves_in_pool(SequenceCapture& capture, std::size_t index) {
  CapturedCall& call = capture.sequence.calls[index];
  std::vector<at::Tensor>& leaves = capture.live[index].leaves;
  for (const auto i : c10::irange(call.inputs.size())) {
    StaticInput& input = call.inputs[i];
    if (input.in_pool) {
      input.tensor = at::empty_like(input.tensor, c10::TensorOptions().device(capture.runtime.device()));
      capture.reads.made(input.tensor);
      capture.resources.exclusions->add_static_input(input.tensor);
      leaves[i] = input.tensor.detach().requires_grad_(input.requires_grad);
    } else if (input.same_as_earlier) {
      const std::size_t first = call.spec.inputs[i].aliases->same_as;
      input.tensor = call.inputs[first].tensor;
      leaves[i] = leaves[first];
    }
  }
}

}  // namespace

void capture_forward(SequenceCapture& capture, std::size_t index) {
  CapturedCall& call = capture.sequence.calls[index];
  SequenceCapture::Live& live = capture.live[index];
  const std::size_t graph_index = capture.order.forward_index(index);
  capture.reads.forward_begins();
  capture.use.comes_to(graph_index);
  capture.release_before(graph_index);
  if (graph_index > 0) {
    drop_gradients_of(capture, graph_index - 1);
  }
  const Site site(Activity::capture_forward, call.spec.scope->site);
  make_leaves(capture, index);
  live.recorder = std::make_unique<SavedTensorRecorder>(*capture.resources.tree, *capture.resources.exclusions,
                                                        capture.resources.offload, &live.planned);
  detail::TensorBuffer outputs;
  SavedStorages saved(*live.recorder);
  const PassHooks hooks(call.spec.hooks.get(), capture.reads.met());
  hooks.before_forward();
  if (call.spec.hooks != nullptr) {
    take_facts(call);
  }
  const std::size_t former = capture.former[index];
  capture.resources.offload->begin_forward(
      call.copies.captured, {capture.shared_slots ? &*capture.shared_slots : nullptr,
                             former != index ? &capture.sequence.calls[former].copies.captured.storages : nullptr});
  capture.use.capture_begins();
  CaptureGuard guard(capture.runtime, capture.stream, *capture.sequence.pool, call.spec.generators);
  allocate_targets(capture, graph_index);
  make_leaves_in_pool(capture, index);
  NodeNaming naming(capture.runtime, capture.stream, call.forward.names, *live.recorder, live.scopes);
  {
    const OperatorObserverGuard observer = capture.reads.watch();
    const OperatorObserverGuard names = naming.watch();
    {
      const RecorderGuard recording(live.recorder.get());
      RecorderScope scope(*live.recorder, call.spec.scope);
      {
        const CallStateGuard state(call.spec.state, Direction::forward);
        live.arguments = arguments_of(call.spec, live.leaves);
        const SavedTensorGuard noting(&saved);
        call.spec.body(live.arguments.data(), outputs);
      }
      scope.end();
    }
    names.rethrow();
    observer.rethrow();
  }
  hold_reads(capture.reads, call);
  capture.reads.forward_ended(index);
  live.recorder->finish();
  const SavedTensorRecorder::Counts counts = live.recorder->counts();
  call.unplanned_bytes = counts.unplanned_bytes;
  call.refused_bytes = counts.refused_bytes;
  capture.runtime.record(call.forward.done, capture.stream);
  capture.record_caller_event();
  capture.resources.offload->end_forward();
  call.forward.graph = guard.end();
  capture.use.capture_ended();
  hooks.after_forward();
  check_captured(capture, index, Direction::forward);
  live.outputs.assign(outputs.begin(), outputs.end());
  learn_outputs(call, live.arguments, outputs, saved, *capture.resources.exclusions);
  capture.lives.forward_captured(
      {call.outputs, call.output_storages},
      {saved, *live.recorder, capture.sizings[index].outputs.kept, call.copies.released_at, call.delays});
  live.arguments.clear();
  if (has_hooks_of_body(outputs)) {
    capture.sequence.plan.notes.push_back(
        capture.sequence.describe(index) +
        " registers gradient hooks inside: replays repeat their tensor operations only; other "
        "effects of the hooks happen at the capture only");
  }
  capture.history.add(capture.sequence.describe(index), live.leaves, all_parameters(capture.sequence), outputs);
}

}  // namespace sidestream
