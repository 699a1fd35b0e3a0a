#include "graphs/outputs/linked_outputs.h"

#include <algorithm>
#include <string>
#include <unordered_set>

#include <c10/util/irange.h>

#include "graphs/outputs/storage_holders.h"
#include "memory/storage_view.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

bool same_place(const at::Tensor& a, const at::Tensor& b) {
  return a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() && a.strides() == b.strides() &&
         a.dtype() == b.dtype();
}

}  // namespace

LinkedOutputs::LinkedOutputs(const std::vector<CallSpec>& specs) : specs_(specs) {
  for (const auto i : c10::irange(specs.size())) {
    for (const CallInput& input : specs[i].inputs) {
      if (input.from) {
        last_reader_[{input.from->call, input.from->index}] = i;
      }
    }
  }
  holders_.add([this](KnownReferences& references) {
    for (const std::vector<at::Tensor>& of_call : outputs_) {
      for (const at::Tensor& output : of_call) {
        references.add(output);
      }
    }
  });
}

void LinkedOutputs::add(const std::vector<at::Tensor>& inputs, const detail::TensorBuffer& made) {
  const std::size_t call = outputs_.size();
  std::vector<at::Tensor>& kept = outputs_.emplace_back();
  std::vector<bool>& views = views_of_inputs_.emplace_back();
  for (const at::Tensor& output : made) {
    const bool read = output.defined() && last_reader_.count({call, kept.size()}) > 0;
    const c10::StorageImpl* const storage = storage_impl_of(output);
    if (storage != nullptr) {
      known_.try_emplace(storage, Known{output.storage().getWeakStorageImpl(), {call, kept.size()}});
    }
    views.push_back(std::any_of(inputs.begin(), inputs.end(), [&](const at::Tensor& input) {
      return same_storage(input, output) && !same_place(input, output);
    }));
    kept.push_back(read ? output.detach().requires_grad_(output.requires_grad()) : at::Tensor());
  }
}

const at::Tensor& LinkedOutputs::of(const CallSpec& reader, const Link& link) const {
  const std::vector<at::Tensor>& given = outputs_[link.call];
  if (link.index >= given.size()) {
    throw UsageError("callable \"" + reader.name + "\" takes output " + std::to_string(link.index) + " of callable \"" +
                     specs_[link.call].name + "\", but that one returns only " + std::to_string(given.size()) +
                     "; outputs count from 0");
  }
  return given[link.index];
}

std::vector<bool> LinkedOutputs::that_may_be_offloaded(std::size_t call, const GraphOptions& options) const {
  std::vector<bool> may;
  for (const CallInput& input : specs_[call].inputs) {
    may.push_back(input.from && !options.retain_graph_in_backward() &&
                  !views_of_inputs_[input.from->call][input.from->index]);
  }
  return may;
}

bool LinkedOutputs::held_by_others(const WeakStorage& storage) const {
  if (holders_.others_hold(storage)) {  // autograd's thread may be the holder
    await_end_of_backward(storage._unsafe_get_target()->device());
  }
  return holders_.others_hold(storage);
}

LinkedOutputs::Use LinkedOutputs::use_by_latest(const std::vector<SavedIdentity>& saved) const {
  Use use;
  for (const auto i : c10::irange(saved.size())) {
    if (const auto known = known_.find(saved[i].storage._unsafe_get_target()); known != known_.end()) {
      use.saved.emplace_back(i, known->second.first);
    }
  }
  const std::size_t call = outputs_.size() - 1;
  std::unordered_set<const c10::StorageImpl*> taken;
  for (const CallInput& input : specs_[call].inputs) {
    taken.insert(input.from ? storage_impl_of(outputs_[input.from->call][input.from->index]) : nullptr);
  }
  for (const auto& [storage, known] : known_) {
    if ((known.first.call == call || taken.contains(storage)) && held_by_others(known.storage)) {
      use.kept.push_back(known.first);
      use.kept_storages.push_back(known.storage);
    }
  }
  return use;
}

void LinkedOutputs::ran(std::size_t call) {
  for (const CallInput& input : specs_[call].inputs) {
    if (input.from && last_reader_.at({input.from->call, input.from->index}) == call) {
      outputs_[input.from->call][input.from->index] = at::Tensor();
    }
  }
}

}  // namespace sidestream
