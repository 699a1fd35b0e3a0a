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

/// A graph that reads what the forward left.
struct Reader {
  const char* name;
  const char* after;
  const char* call;
  const char* since;  ///< then it was possible to change what it reads
  const char* remedy;
};
constexpr Reader kBackward{"its backward", "the backward", "backward()", "since its forward",
                           "Change weights between steps, not between forward and backward"};
constexpr Reader kWeights{"backward_dw", "backward_dw", "backward_dw()", "since its backward",
                          "Call backward_dw before you change weights"};

/// In plain training autograd compares the versions of saved tensors; a graph reads the same bytes.
/// Throws: UsageError that names a tensor that was changed in place and that `reader` needs.
void check_versions(const CapturedCall& call, const Reader& reader) {
  const auto changed = [&](const char* what, std::size_t index, const char* why) {
    throw UsageError("graphed call \"" + call.spec.name + "\": " + what + std::to_string(index) +
                     " was changed in place before " + reader.name + ", " + why +
                     ": clone it before the in-place operation");
  };
  for (const std::size_t i : call.lists.stamped_inputs) {
    if (!call.inputs[i].version.unchanged()) {
      changed("input ", i, "which needs it");
    }
  }
  for (const auto i : c10::irange(call.outputs.size())) {
    const StaticOutput& output = call.outputs[i];
    if ((output.saved || output.overlaps) && !output.version.unchanged()) {
      changed(
          "output ", i,
          output.saved ? "which needs it" : "and it shares memory with another output, whose gradient would be wrong");
    }
  }
}

/// Throws: UsageError if the backward graph would read or do something else than at its capture.
void check_state(const CapturedSequence& sequence, std::size_t index, const Reader& reader) {
  const CapturedCall& call = sequence.calls[index];
  const CallModes& captured = call.spec.state.backward_modes;
  const CallModes now = CallModes::current(captured.autocast.type);
  if (!(now == captured)) {
    const bool autocast = !(now.autocast == captured.autocast);
    throw UsageError(sequence.describe(index) + ": " + reader.name + " runs in another state of " +
                     (autocast ? "autocast" : "the global switches (deterministic algorithms, precision, back ends)") +
                     " than it was captured in" +
                     (autocast && now.autocast.enabled
                          ? std::string("; call ") + reader.call + " outside of the autocast region"
                          : "; set it as in the step that was captured") +
                     ", or call OffloadEngine::reset");
  }
  for (const BackwardRead& read : call.reads.in_backward) {
    if (read.counter.current_version() != read.at_forward) {
      throw UsageError(sequence.describe(index) + ": " + read.name + ", which " + reader.name +
                       " needs, has been modified by an inplace operation since its forward (version " +
                       std::to_string(read.counter.current_version()) + ", expected " +
                       std::to_string(read.at_forward) + "); change it after " + reader.after);
    }
  }
  FactsChange weights = call.reads.modules.tensors_change();
  TensorFacts::add_changes(call.reads.watched, weights);
  if (weights.stale()) {
    throw UsageError(sequence.describe(index) + ": " + reader.since + ", " + sequence.difference(index) + "; " +
                     reader.name + " would read weights that the model no longer has. " + reader.remedy);
  }
}

/// Plain training decides in the backward who gets a gradient.
void refuse_frozen(const CapturedCall& call, OutputSet used, const char* between, const char* remedy) {
  for (const std::size_t i : call.lists.delayed_parameters) {
    if ((call.parameters[i].outputs & used) != 0 && !call.parameters[i].tensor.requires_grad()) {
      throw UsageError("graphed call \"" + call.spec.name +
                       "\": a parameter whose gradient is delayed was frozen between " + between + ". " + remedy +
                       " after backward_dw");
    }
  }
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
        "failed, drop its outputs");
  }
  if (!calls[call].spec.chunk.empty()) {
    throw UsageError(describe(call) + ": expected the backward of " + describe(obstacle) + ", got this " + got +
                     "; run the chunks in the order that GraphOptions::order was given, and each backward to its end "
                     "before the next one begins, or make the callables with the order of your steps");
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
  const torch::nn::Module* model = nullptr;  // of the plain functions, whose replays look at few of its modules
  for (const auto i : c10::irange(calls.size())) {
    const ModuleFacts& modules = calls[i].reads.modules;
    if (modules.attends() && modules.root() != model) {
      model = modules.root();
      all |= modules.members_change();
    }
    all |= change(i);
  }
  return all;
}

FactsChange CapturedSequence::change_before_pass() const noexcept {
  FactsChange all;
  const torch::nn::Module* model = nullptr;  // as in change()
  for (const auto i : c10::irange(calls.size())) {
    const CapturedCall& call = calls[i];
    if (call.replay.released) {
      continue;
    }
    FactsChange of_call = change(i);
    if (call.reads.modules.attends() && call.reads.modules.root() != model) {
      model = call.reads.modules.root();
      of_call |= call.reads.modules.members_change();
    }
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
  InputAliases::InTurn all_aliases(inputs);
  for (const auto i : c10::irange(inputs.size())) {
    const StaticInput& held = call.inputs[i];
    const at::Tensor& given = inputs[i];
    if (given.defined() != held.tensor.defined()) {
      return false;
    }
    if (given.defined() && (is_sparse_or_nested(given) || given.sizes() != held.tensor.sizes() ||
                            given.dtype() != held.tensor.dtype() || given.device() != held.tensor.device() ||
                            (call.spec.state.modes.gradients && given.requires_grad() != held.requires_grad) ||
                            breaks_link(calls, held, given))) {
      return false;
    }
    if (call.casts && held.requires_grad && has_shared_cast(given) != call.spec.inputs[i].shared_cast) {
      return false;
    }
    if (const auto& aliases = call.spec.inputs[i].aliases; aliases) {  // of a call all arguments have them, or none
      const InputAliases now = all_aliases.next();
      if (given.defined() && (!(now == *aliases) || (!held.from && given.is_non_overlapping_and_dense() &&
                                                     !same_strides(given, held.tensor)))) {
        return false;
      }
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
    throw UsageError(describe(index) + ": replayed after reset; capture it again");
  }
  if (accepts(index, inputs)) {
    return;
  }
  const CapturedCall& call = calls[index];
  refuse_composite_inputs(describe(index), inputs);
  if (inputs.size() != call.inputs.size()) {
    throw UsageError(describe(index) + ": captured with " + std::to_string(call.inputs.size()) + " tensors, given " +
                     std::to_string(inputs.size()));
  }
  for (const auto i : c10::irange(inputs.size())) {
    const StaticInput& held = call.inputs[i];
    const at::Tensor& given = inputs[i];
    const std::string where = describe(index) + ": input " + std::to_string(i) + " ";
    if (given.defined() != held.tensor.defined()) {
      throw UsageError(where + (given.defined() ? "is a tensor but was undefined" : "is undefined but was a tensor") +
                       " at capture; pass the same arguments as captured");
    }
    if (!given.defined()) {
      continue;
    }
    const auto differs = [&](const std::string& what, const auto& now, const auto& then) {
      throw UsageError(where + "has " + what + " " + c10::str(now) + ", captured with " + c10::str(then) +
                       "; pass what was captured, or capture again");
    };
    if (given.sizes() != held.tensor.sizes()) {
      differs("shape", given.sizes(), held.tensor.sizes());
    }
    if (given.dtype() != held.tensor.dtype()) {
      differs("dtype", given.scalar_type(), held.tensor.scalar_type());
    }
    if (given.device() != held.tensor.device()) {
      differs("device", given.device(), held.tensor.device());
    }
    if (call.spec.state.modes.gradients && given.requires_grad() != held.requires_grad) {
      differs("requires_grad", given.requires_grad(), held.requires_grad);
    }
    if (calls[index].casts && held.requires_grad && has_shared_cast(given) != call.spec.inputs[i].shared_cast) {
      throw UsageError(
          where +
          (has_shared_cast(given) ? "is a leaf, but was captured with a tensor that is not a leaf"
                                  : "is not a leaf, but was captured with a leaf") +
          "; autocast casts them differently. Capture with a sample of the same kind: x.view_as(x) is not a leaf");
    }
    if (breaks_link(calls, held, given)) {
      throw UsageError(where +
                       "was captured as the output of an earlier call and shares its memory; pass exactly that " +
                       "output, or capture with a sample tensor of its own");
    }
    if (call.spec.inputs[i].aliases) {
      const InputAliases now = InputAliases::of(inputs, i);
      if (!(now == *call.spec.inputs[i].aliases)) {
        throw UsageError(where + "shares its memory with another argument, or did so at the capture; pass the same " +
                         "arguments as captured, or set CallOptions::on_new_arguments to capture");
      }
      if (given.is_non_overlapping_and_dense() && !same_strides(given, held.tensor)) {
        differs("strides", given.strides(), held.tensor.strides());
      }
    }
  }
}

void CapturedCall::stamp_versions(c10::ArrayRef<at::Tensor> given, const detail::TensorBuffer& made) {
  for (const std::size_t i : lists.stamped_inputs) {  // what else is saved was copied: the caller's own may change
    inputs[i].version = VersionStamp(given[i]);
  }
  for (const auto i : c10::irange(outputs.size())) {
    StaticOutput& output = outputs[i];
    if (output.saved || output.overlaps) {
      output.version = VersionStamp(made[i]);
    }
  }
}

void CapturedSequence::check_backward(std::size_t index, std::uint64_t generation, bool has_turn,
                                      const PendingRuns& pending, const PendingRuns& weights) const {
  const CapturedCall& call = calls[index];
  if (!call.backward.graph) {
    throw UsageError(describe(index) + ": it was reset before this backward; run the backward first");
  }
  if (!has_turn) {
    throw UsageError(describe(index) +
                     ": another capture in the same memory was replayed since its forward, and has overwritten its " +
                     "saved tensors; run its backward before that replay, or capture it in a pool of its own");
  }
  if (call.replay.generation != generation) {
    throw UsageError(describe(index) +
                     ": this backward belongs to an earlier forward, whose saved tensors a later one has " +
                     "overwritten; run each backward before the next forward of the same capture");
  }
  if (call.replay.backward_failed && call.accumulates) {
    throw UsageError(describe(index) + ": its backward failed after its graph had begun to add into .grad; " +
                     "set the gradients to none and run its forward again");
  }
  if (call.replay.backward_launched && !options.retain_graph_in_backward()) {
    throw UsageError(describe(index) + ": its backward is run a second time" +
                     (call.replay.backward_failed ? ", after one that failed after the launch of its graph" : "") +
                     ", but its saved tensors were not kept; capture with GraphOptions::retain_graph_in_backward" +
                     (call.delays ? ", and with another GradientPolicy than delayed" : ""));
  }
  if (const auto obstacle = pending.obstacle(order.backward_index(index))) {
    check_turn(index, *obstacle, "backward");
    throw UsageError(
        describe(index) + ": its backward runs before that of \"" + calls[*obstacle].spec.name + "\", which was " +
        "called after it; run the backwards of calls that were captured together in reverse order, or capture the "
        "calls separately");
  }
  if (const auto obstacle = weights.obstacle(order.backward_index(index))) {
    check_turn_of_weights(index, *obstacle, "backward");
    throw UsageError(describe(index) + ": its backward would overwrite what the delayed weight gradients of " +
                     describe(*obstacle) +
                     " are computed from, because the step's order has these before this backward; call backward_dw in "
                     "that order, or give step() the order that runs");
  }
  check_state(*this, index, kBackward);
  check_versions(call, kBackward);
  refuse_frozen(call, all_outputs, "the call's forward and its backward", "Freeze it before the forward or");
}

void CapturedSequence::check_weights(std::size_t index) const {
  if (!calls[index].replay.weights_delayed) {
    throw UsageError(
        describe(index) +
        ": its weight gradients cannot be computed: it was reset since its backward. Call backward_dw before "
        "GraphedCallable::reset");
  }
  check_state(*this, index, kWeights);
  check_versions(calls[index], kWeights);
  refuse_frozen(calls[index], calls[index].replay.used, "the call's backward and backward_dw", "Freeze it");
}

}  // namespace sidestream
