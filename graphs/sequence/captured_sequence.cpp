#include "graphs/sequence/captured_sequence.h"

#include <algorithm>
#include <string>
#include <utility>

#include <c10/util/irange.h>
#include <torch/csrc/autograd/variable.h>

#include "graphs/sequence/graph_resources.h"
#include "offload/gradient_owner.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// The memory for the captures of a sequence.
std::shared_ptr<GraphMemory> memory_for(const GraphResources& resources, const GraphOptions& options) {
  if (resources.memory != nullptr) {
    return resources.memory;
  }
  return options.pool() != nullptr ? GraphMemory::of(*options.pool(), resources.runtime->device())
                                   : std::make_shared<GraphMemory>(GraphMemory::Use::own);
}

FactsChange with_watched(FactsChange modules, const CapturedCall& call) noexcept {
  TensorFacts::add_changes(call.reads.watched, modules);
  return modules;
}

/// With what changed in the members of all modules of a plain function's model, at which its replays do not look. They are looked at
/// once for the calls of one model: `model` is the latest.
FactsChange with_members(FactsChange change, const ModuleFacts& modules, const torch::nn::Module*& model) noexcept {
  if (modules.attends() && modules.root() != model) {
    model = modules.root();
    change |= modules.members_change();
  }
  return change;
}

/// True if `given` is another output than `output` of the call that gave it. Two may be one memory. An output that was changed in place is
/// the same one.
bool is_other_output(const CapturedCall& giver, std::size_t output, const at::Tensor& given) {
  const auto* const meta = torch::autograd::impl::get_autograd_meta(given);
  const StaticOutput& held = giver.outputs[output];
  const std::size_t first = held.kind == StaticOutput::Kind::earlier_output ? held.of : output;
  const auto end = giver.outputs.begin() + static_cast<std::ptrdiff_t>(first);
  const auto number =
      std::count_if(giver.outputs.begin(), end, [](const StaticOutput& earlier) { return earlier.requires_grad; });
  return meta != nullptr && meta->output_nr_ != number &&
         dynamic_cast<const GradientOwner*>(meta->grad_fn_.get()) != nullptr;
}

/// True if `input` is the output of another call, which still makes it, and `given` is not that output: the one of the latest forward, in
/// whatever memory it is by now.
bool breaks_link(const CapturedCalls& calls, const StaticInput& input, const at::Tensor& given) {
  if (!input.from || calls[input.from->call].replay.released) {
    return false;
  }
  const CapturedCall& giver = calls[input.from->call];
  return !given.has_storage() || !giver.output_storages[giver.outputs[input.from->index].of].gave(given.storage()) ||
         given.storage_offset() != input.tensor.storage_offset() || !same_layout(given, input.tensor) ||
         is_other_output(giver, input.from->index, given);
}

/// True if input `i` of `call` is what the call was captured with, except for its address. If it is not, `refuse` is given the parts of a
/// message, and its result is returned. The input is neither sparse nor nested. Allocates nothing.
template <class Refuse>
bool is_as_captured(const CapturedCalls& calls, const CapturedCall& call, c10::ArrayRef<at::Tensor> inputs,
                    std::size_t i, const Refuse& refuse) {
  const StaticInput& held = call.inputs[i];
  const at::Tensor& given = inputs[i];
  const auto differs = [&](const char* what, const auto& now, const auto& then) {
    return refuse("has ", what, " ", now, ", captured with ", then, "; pass what was captured, or capture again");
  };
  if (given.defined() != held.tensor.defined()) {
    return refuse(given.defined() ? "is a tensor but was undefined" : "is undefined but was a tensor",
                  " at capture; pass the same arguments as captured");
  }
  if (!given.defined()) {
    return true;
  }
  if (given.sizes() != held.tensor.sizes()) {
    return differs("shape", given.sizes(), held.tensor.sizes());
  }
  if (given.dtype() != held.tensor.dtype()) {
    return differs("dtype", given.scalar_type(), held.tensor.scalar_type());
  }
  if (given.device() != held.tensor.device()) {
    return differs("device", given.device(), held.tensor.device());
  }
  if (call.spec.state.modes.gradients && given.requires_grad() != held.requires_grad) {
    return differs("requires_grad", given.requires_grad(), held.requires_grad);
  }
  if (call.casts && held.requires_grad && has_shared_cast(given) != call.spec.inputs[i].shared_cast) {
    return refuse(
        has_shared_cast(given) ? "is a leaf, but was captured with a tensor that is not a leaf"
                               : "is not a leaf, but was captured with a leaf",
        "; autocast casts them differently. Capture with a sample of the same kind: x.view_as(x) is not a leaf");
  }
  if (breaks_link(calls, held, given)) {
    return refuse(
        "was captured as the output of an earlier call and shares its memory; pass exactly that output, or capture "
        "with a sample tensor of its own");
  }
  const auto& aliases = call.spec.inputs[i].aliases;
  if (aliases && !(InputAliases::of(inputs, i) == *aliases)) {
    return refuse(
        "shares its memory with another argument, or did so at the capture; pass the same arguments as captured, or "
        "set CallOptions::on_new_arguments to capture");
  }
  if (aliases && !held.from && given.is_non_overlapping_and_dense() && !same_strides(given, held.tensor)) {
    return differs("strides", given.strides(), held.tensor.strides());
  }
  return true;
}

}  // namespace

CapturedSequence::CapturedSequence(const GraphResources& resources, const GraphOptions& given, SequenceOrder steps)
    : arena(resources.arena),
      options(given),
      memory(memory_for(resources, given)),
      pool(memory->pool(resources.runtime)),
      order(std::move(steps)) {}

std::string CapturedSequence::describe(std::size_t call) const {
  const std::optional<ChunkId>& chunk = calls[call].replay.chunk_id;
  return "graphed call \"" + calls[call].spec.name + "\"" +
         (chunk ? " (stage " + std::to_string(chunk->stage) + ", microbatch " + std::to_string(chunk->microbatch) + ")"
                : calls[call].spec.chunk);
}

void CapturedSequence::check_turn(std::size_t call, std::size_t obstacle, const char* got) const {
  if (calls[call].replay.chunk_id && calls[call].replay.chunk != calls[obstacle].replay.chunk) {
    throw UsageError(
        describe(call) + ": expected the backward of " + describe(obstacle) + ", got this " + got +
        "; run forwards and backwards in the order that OffloadEngine::step was given, and each backward "
        "to its end before the next one begins, or give step() the order that runs. If that call is of a step that "
        "failed, drop its outputs. If the first step with that order ran in another one, call OffloadEngine::reset");
  }
  if (!calls[call].spec.chunk.empty()) {
    throw UsageError(describe(call) + ": expected the backward of " + describe(obstacle) + ", got this " + got +
                     "; run the chunks in the order that GraphOptions::order was given, and each backward to its end "
                     "before the next one begins, or make the callables with the order of your steps. "
                     "OffloadEngine::chunk says which microbatch a call is of");
  }
}

void CapturedSequence::check_turn_of_weights(std::size_t call, std::size_t obstacle, const char* got) const {
  if (!calls[call].spec.chunk.empty()) {
    throw UsageError(describe(call) + ": expected backward_dw of " + describe(obstacle) + ", got this " + got +
                     "; compute the delayed weight gradients before this call, let no other chunk run between the "
                     "layers of a backward, or make the callables with the order of your steps, weight gradients "
                     "included");
  }
}

bool CapturedSequence::is_linked(std::size_t call) const {
  const std::vector<StaticInput>& inputs = calls[call].inputs;
  return std::any_of(inputs.begin(), inputs.end(),
                     [&](const StaticInput& input) { return input.from && !calls[input.from->call].replay.released; });
}

bool CapturedSequence::released() const {
  return std::all_of(calls.begin(), calls.end(), [](const CapturedCall& call) { return call.replay.released; });
}

FactsChange CapturedSequence::change(std::size_t index) const noexcept {
  return with_watched(calls[index].reads.modules.change(), calls[index]);
}

FactsChange CapturedSequence::change_of_all(std::size_t index) const noexcept {
  return with_watched(calls[index].reads.modules.change_of_all(), calls[index]);
}

FactsChange CapturedSequence::change() const noexcept {
  FactsChange all;
  const torch::nn::Module* model = nullptr;
  for (const auto i : c10::irange(calls.size())) {
    all |= with_members(change(i), calls[i].reads.modules, model);
  }
  return all;
}

FactsChange CapturedSequence::change_before_pass() const noexcept {
  FactsChange all;
  const torch::nn::Module* model = nullptr;
  for (const auto i : c10::irange(calls.size())) {
    const CapturedCall& call = calls[i];
    if (call.replay.released) {
      continue;
    }
    FactsChange of_call = with_members(change(i), call.reads.modules, model);
    if (of_call.layout) {
      continue;
    }
    of_call.training = of_call.options = false;
    if (call.placed_by_hooks) {
      of_call.relocated = of_call.identity = false;
    }
    all |= of_call;
  }
  return all;
}

std::string CapturedSequence::difference(std::size_t index) const {
  const CapturedCall& call = calls[index];
  std::string text = call.reads.modules.difference();
  for (const TensorFacts& watched : call.reads.watched) {
    if (const std::string what = watched.difference(); text.empty() && !what.empty()) {
      text = "a tensor that it reads " + what;
    }
  }
  return text;
}

bool CapturedSequence::accepts(std::size_t index, c10::ArrayRef<at::Tensor> inputs) const {
  const CapturedCall& call = calls[index];
  if (inputs.size() != call.inputs.size()) {
    return false;
  }
  for (const auto i : c10::irange(inputs.size())) {
    if (is_sparse_or_nested(inputs[i]) ||
        !is_as_captured(calls, call, inputs, i, [](const auto&...) { return false; })) {
      return false;
    }
  }
  return true;
}

bool CapturedSequence::follows_eager_call(std::size_t index, c10::ArrayRef<at::Tensor> inputs) const {
  const std::vector<StaticInput>& captured = calls[index].inputs;
  for (const auto i : c10::irange(std::min(inputs.size(), captured.size()))) {
    const StaticInput& held = captured[i];
    if (held.from && calls[held.from->call].replay.ran_eagerly && breaks_link(calls, held, inputs[i])) {
      return true;
    }
  }
  return false;
}

void CapturedSequence::check(std::size_t index, c10::ArrayRef<at::Tensor> inputs) const {
  if (!calls[index].forward.graph) {
    throw UsageError(describe(index) + ": replayed after reset; make the callables again");
  }
  if (accepts(index, inputs)) {
    return;
  }
  const CapturedCall& call = calls[index];
  refuse_composite_inputs(describe(index), inputs);
  if (inputs.size() != call.inputs.size()) {
    throw UsageError(describe(index) + ": captured with " + std::to_string(call.inputs.size()) + " tensors, given " +
                     std::to_string(inputs.size()) + "; pass one for each sample");
  }
  for (const auto i : c10::irange(inputs.size())) {
    is_as_captured(calls, call, inputs, i, [&](const auto&... difference) -> bool {
      throw UsageError(c10::str(describe(index), ": input ", i, " ", difference...));
    });
  }
}

}  // namespace sidestream
