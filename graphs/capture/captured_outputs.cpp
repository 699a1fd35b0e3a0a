#include "graphs/capture/sequence_capture.h"

#include <algorithm>
#include <string>

#include <ATen/MemoryOverlap.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/variable.h>

#include "graphs/gradients/gradient_leaves.h"
#include "memory/storage_view.h"
#include "observe/external_reads.h"
#include "offload/autograd_walk.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

using Kind = StaticOutput::Kind;

/// The parameter, buffer or other tensor that a replay finds where the capture did, and that `output` is or is a view of.
at::Tensor owner_of(const CapturedCall& call, const at::Tensor& output, const Exclusions& exclusions) {
  at::Tensor found;
  const at::Tensor base = output.is_view() ? at::Tensor(output._base()) : at::Tensor();
  // Parameters may be parts of one buffer: a view lies in its own base's part. Two may even be all of it, and then the base tells.
  const auto look_at = [&](const at::Tensor& tensor) {
    if (tensor.is_same(output) || tensor.is_same(base) ||
        (!found.defined() && same_storage(tensor, output) &&
         bytes_in_storage(tensor).contains(bytes_in_storage(output)))) {
      found = tensor;
    }
  };
  for (const CallParameter& parameter : call.parameters) {
    look_at(parameter.tensor);
  }
  for (const TensorFacts& registered : call.reads.modules.tensors()) {
    look_at(registered.tensor());
  }
  for (const TensorFacts& watched : call.reads.watched) {
    look_at(watched.tensor());
  }
  if (!found.defined() && output.has_storage()) {
    for (const at::Tensor& registered : exclusions.registered_in(output.storage())) {
      look_at(registered);
    }
  }
  const bool external =
      std::any_of(call.reads.externals.begin(), call.reads.externals.end(), [&](const c10::Storage& storage) {
        return storage.unsafeGetStorageImpl() == output.storage().unsafeGetStorageImpl();
      });
  return found.defined() || !external ? found : output.detach();
}

class OutputSorter {
 public:
  OutputSorter(CapturedCall& call, const std::vector<at::Tensor>& leaves, const detail::TensorBuffer& outputs)
      : call_(call), leaves_(leaves), outputs_(outputs) {}

  void sort(std::size_t index, const SavedStorages& saved, const Exclusions& exclusions) {
    const at::Tensor& output = outputs_[index];
    StaticOutput& held = call_.outputs[index];
    if (!output.defined()) {
      return;
    }
    held.tensor = output.detach();
    const auto same = [&](const at::Tensor& tensor) { return tensor.defined() && tensor.is_same(output); };
    const auto shares = [&](const at::Tensor& tensor) { return same_storage(tensor, output); };
    const auto first_of = [](const auto& tensors, std::size_t until, const auto& fits) {
      return static_cast<std::size_t>(
          std::find_if(tensors.begin(), tensors.begin() + static_cast<std::ptrdiff_t>(until), fits) - tensors.begin());
    };
    if (held.of = first_of(outputs_, index, same); held.of < index) {
      held.kind = Kind::earlier_output;
      return;
    }
    if (held.of = first_of(leaves_, leaves_.size(), same); held.of < leaves_.size()) {
      held.kind = Kind::input;
      return;
    }
    held.owner = owner_of(call_, output, exclusions);
    refuse_leaf(index);
    if (held.of = first_of(leaves_, leaves_.size(), shares); held.of < leaves_.size()) {
      held.kind = Kind::view_of_input;
      held.owner = at::Tensor();
      held.detached = leaves_[held.of].requires_grad() && !backward_may_begin_from(output);
      check_view(index, leaves_[held.of], "input " + std::to_string(held.of));
    } else if (held.owner.defined()) {
      held.detached =
          !held.owner.is_same(output) && (!call_.spec.state.modes.gradients || !backward_may_begin_from(output));
      held.kind = held.owner.is_same(output) || held.detached ? Kind::other : Kind::view_of_other;
      if (held.kind == Kind::view_of_other) {
        if (!held.owner.requires_grad()) {
          throw CaptureError(
              "graphed call \"" + call_.spec.name + "\": output " + std::to_string(index) +
              " requires a gradient, but lies in memory that the call did not make; clone it in the call");
        }
        check_view(index, held.owner, "a parameter or buffer");
      } else if (held.detached) {
        held.owner = held.tensor;
      }
    } else {
      made(index, saved);
    }
  }

 private:
  // In plain training its gradient comes into its own `.grad`. A replay returns no leaf, so that gradient has no place.
  void refuse_leaf(std::size_t index) const {
    const at::Tensor& output = outputs_[index];
    // A view that was made without gradients has its base's flag, but none of its own.
    const auto* const meta = torch::autograd::impl::get_autograd_meta(output);
    if (meta != nullptr && meta->requires_grad_ && output.is_leaf() && !call_.outputs[index].owner.is_same(output)) {
      throw CaptureError("graphed call \"" + call_.spec.name + "\": output " + std::to_string(index) +
                         " is a leaf that requires a gradient, but it is neither an argument nor a registered "
                         "parameter. A replay returns no leaf, so its .grad would stay undefined. Make the leaf "
                         "outside of the call, and pass it as an argument");
    }
  }
  // Made again with as_strided, whose backward adds up otherwise than an expand's.
  void check_view(std::size_t index, const at::Tensor& base, const std::string& of) const {
    const at::Tensor& output = outputs_[index];
    if (output.scalar_type() != base.scalar_type() || output.key_set() != base.key_set() ||
        at::has_internal_overlap(output) == at::MemOverlap::Yes) {
      throw CaptureError("graphed call \"" + call_.spec.name + "\": output " + std::to_string(index) +
                         " is a view of " + of +
                         " with another dtype, conjugated or expanded; a replay cannot make such a view again. Clone "
                         "the output in the call, or make the view outside");
    }
    if (const auto& node = output.grad_fn(); node != nullptr && has_hooks(*node)) {
      throw CaptureError("graphed call \"" + call_.spec.name + "\": output " + std::to_string(index) +
                         " is a view of " + of +
                         " on which the call registers a gradient hook. A replay makes the view again, without the "
                         "hook; register the hook outside of the call, or clone the output in the call");
    }
    if (output.is_view() && torch::autograd::impl::get_view_autograd_meta(output)->get_creation_meta() ==
                                torch::autograd::CreationMeta::IN_CUSTOM_FUNCTION) {
      throw CaptureError("callable \"" + call_.spec.name + "\": output " + std::to_string(index) + " is a view of " +
                         of +
                         " that an autograd function of the callable returns. A replay would make the view without the "
                         "function and its gradient; clone the output in the callable");
    }
  }

  void made(std::size_t index, const SavedStorages& saved) {
    const at::Tensor& output = outputs_[index];
    StaticOutput& held = call_.outputs[index];
    auto& storages = call_.output_storages;
    held.kind = Kind::made;
    held.requires_grad = backward_may_begin_from(output);
    held.view = StorageView::capture(held.tensor);
    held.saved = saved.contains(output);
    held.shares_version_with = index;
    held.of = static_cast<std::size_t>(
        std::find_if(storages.begin(), storages.end(),
                     [&](const OutputStorage& storage) { return storage.is(output.storage()); }) -
        storages.begin());
    if (held.of == storages.size()) {
      storages.emplace_back(output.storage());
    }
    for (const auto earlier : c10::irange(index)) {
      StaticOutput& other = call_.outputs[earlier];
      if (other.kind == Kind::made && other.of == held.of) {
        held.shares_version_with = std::min(held.shares_version_with, earlier);
        if (at::get_overlap_status(outputs_[earlier], output) != at::MemOverlapStatus::No) {
          other.overlaps = held.overlaps = true;
        }
      }
    }
  }

  CapturedCall& call_;
  const std::vector<at::Tensor>& leaves_;
  const detail::TensorBuffer& outputs_;
};

}  // namespace

void learn_outputs(CapturedCall& call, const std::vector<at::Tensor>& leaves, const detail::TensorBuffer& outputs,
                   const SavedStorages& saved, const Exclusions& exclusions) {
  call.outputs.resize(outputs.size());
  OutputSorter sorter(call, leaves, outputs);
  for (const auto i : c10::irange(outputs.size())) {
    sorter.sort(i, saved, exclusions);
    call.has_backward = call.has_backward || call.outputs[i].requires_grad;
  }
  for (const auto i : c10::irange(leaves.size())) {
    call.inputs[i].saved = saved.contains(leaves[i]);
  }
}

}  // namespace sidestream
