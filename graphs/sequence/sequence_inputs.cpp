// Compares the inputs of a replay with those of the capture.
#include <string>

#include <c10/util/irange.h>

#include "graphs/sequence/captured_sequence.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// True if `input` is the output of another call, which still makes it, and `given` is not that output: the one of the latest forward, in
/// whatever memory it is by now.
bool breaks_link(const CapturedCalls& calls, const StaticInput& input, const at::Tensor& given) {
  if (!input.from || calls[input.from->call].replay.released) {
    return false;
  }
  const CapturedCall& giver = calls[input.from->call];
  return !given.has_storage() || !giver.output_storages[giver.outputs[input.from->index].of].gave(given.storage()) ||
         given.storage_offset() != input.tensor.storage_offset() || !same_layout(given, input.tensor);
}

}  // namespace

bool CapturedSequence::accepts(std::size_t index, c10::ArrayRef<at::Tensor> inputs) const {
  const CapturedCall& call = calls[index];
  if (inputs.size() != call.inputs.size()) {
    return false;
  }
  AliasesInTurn all_aliases(inputs);
  for (const auto i : c10::irange(inputs.size())) {
    const StaticInput& held = call.inputs[i];
    const at::Tensor& given = inputs[i];
    if (given.defined() != held.tensor.defined()) {
      return false;
    }
    if (given.defined() && (given.sizes() != held.tensor.sizes() || given.dtype() != held.tensor.dtype() ||
                            given.device() != held.tensor.device() ||
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
                                                     !same_layout(given, held.tensor)))) {
        return false;
      }
    }
  }
  return true;
}

void CapturedSequence::check(std::size_t index, c10::ArrayRef<at::Tensor> inputs) const {
  if (!calls[index].forward.graph) {
    throw UsageError(describe(index) + ": replayed after reset; capture it again");
  }
  if (accepts(index, inputs)) {
    return;
  }
  const CapturedCall& call = calls[index];
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
      if (given.is_non_overlapping_and_dense() && !same_layout(given, held.tensor)) {
        differs("strides", given.strides(), held.tensor.strides());
      }
    }
  }
}

}  // namespace sidestream
