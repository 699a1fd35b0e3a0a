#include "graphs/capture/observed_weights.h"

#include <algorithm>

#include <ATen/SequenceNumber.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/variable.h>

#include "offload/version_stamp.h"
#include "runtime/composite.h"
#include "sidestream/error.h"

namespace sidestream {

ObservedWeights::ObservedWeights(const ExternalReads& externals)
    : externals_(externals), first_node_(at::sequence_number::peek()) {}

void ObservedWeights::note_node(const at::Tensor& made) {
  const auto* const meta = torch::autograd::impl::get_autograd_meta(made);
  if (meta != nullptr && meta->grad_fn_ != nullptr) {
    nodes_.insert_or_assign(meta->grad_fn_.get(), meta->grad_fn_);
  }
}

bool ObservedWeights::made_outside(const at::Tensor& tensor) {
  if (made_inside(tensor)) {
    note_node(tensor);  // a function of the body's own sets it after its operators
    return false;
  }
  // A view makes its node anew where its base was written since, and the base then tells.
  if (tensor.is_view()) {
    return made_.count(tensor._base().unsafeGetTensorImpl()) == 0;
  }
  const auto& node = tensor.grad_fn();
  if (node->thread_id() == thread_ && node->sequence_nr() >= first_node_) {
    return false;
  }
  // A backward inside of the forward makes nodes on autograd's threads. It unpacks a saved tensor as another tensor of the same node.
  const auto known = nodes_.find(node.get());
  return known == nodes_.end() || known->second.lock() != node;
}

void ObservedWeights::refuse_sparse(const at::Tensor& read) const {
  if (!is_composite(read) || read.has_storage() || made_inside(read)) {
    return;
  }
  for_each_part(read, [&](const at::Tensor& part) {
    if (part.has_storage() && externals_.find(part.storage().unsafeGetStorageImpl()) != nullptr) {
      throw UsageError(c10::str("it reads a sparse tensor of shape ", read.sizes(),
                                " from outside of the call. Replays could not notice that it changes; make the sparse "
                                "tensor inside of the call from its indices and values, or leave the call out of "
                                "Options::graph"));
    }
  });
}

void ObservedWeights::observe(const OperatorAccess& access) {
  for (const at::Tensor& read : access.reads) {
    if (!in_backward_) {
      refuse_sparse(read);
    }
    if (!read.has_storage() || read.is_inference()) {
      continue;
    }
    const c10::StorageImpl* const storage = read.storage().unsafeGetStorageImpl();
    if (in_backward_) {
      if (versions_.count(storage) != 0) {
        read_in_backward_.insert(storage);
      }
      continue;
    }
    if (read.requires_grad() && !read.is_leaf() && made_outside(read)) {
      throw UsageError(c10::str("it reads a tensor of shape ", read.sizes(),
                                " that was computed from weights outside of the call (a parametrised weight, or one "
                                "that is tied through a view). A graph would freeze its values and its gradient; pass "
                                "the tensor as an argument, or compute it inside the call"));
    }
    if (externals_.find(storage) != nullptr) {
      std::vector<c10::VariableVersion>& versions = versions_[storage];
      const c10::VariableVersion& version = torch::autograd::impl::version_counter(read);
      if (std::none_of(versions.begin(), versions.end(),
                       [&](const c10::VariableVersion& known) { return is_same(known, version); })) {
        versions.push_back(version);
      }
    }
  }
  if (!in_backward_) {
    for (const at::Tensor& output : access.outputs) {
      if (output.defined()) {
        made_.emplace(output.unsafeGetTensorImpl(), c10::weak_intrusive_ptr<c10::TensorImpl>(output.getIntrusivePtr()));
        note_node(output);
      }
    }
  }
}

}  // namespace sidestream
