#include "graphs/whole_step/whole_step_watch.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "memory/storage_view.h"
#include "sidestream/error.h"

namespace sidestream {

bool WholeStepWatch::writes_parameter(const OperatorAccess& access) const {
  return std::any_of(access.writes.begin(), access.writes.end(), [&](const at::Tensor& written) {
    return std::any_of(parameters_.begin(), parameters_.end(),
                       [&](const at::Tensor& parameter) { return same_storage(written, parameter); });
  });
}

void WholeStepWatch::begin_pass(std::vector<at::Tensor> parameters, bool captures) {
  parameters_ = std::move(parameters);
  captures_ = captures;
  updating_ = false;
  for (const c10::Storage& storage : made_by_update_.alive()) {
    made_by_updates_.insert(storage);
  }
  made_by_update_.clear();
}

void WholeStepWatch::refuse_frozen_gradient(const OperatorAccess& access) const {
  for (const at::Tensor& written : access.writes) {
    const bool other = written.requires_grad() && written.is_leaf() && written.grad().defined() &&
                       std::none_of(parameters_.begin(), parameters_.end(),
                                    [&](const at::Tensor& parameter) { return parameter.is_same(written); });
    if (other) {
      throw CaptureError("graphed step \"" + name_ + "\": its update writes (" + access.name +
                         ") a parameter that is not in its module and that its loss does not depend on. The graph "
                         "would freeze that parameter's gradient; clear the gradient, leave the parameter out of the "
                         "update, or update it eagerly after the step");
    }
  }
}

void WholeStepWatch::after(const OperatorAccess& access) {
  if (!updating_) {
    return;
  }
  for (const at::Tensor& output : access.outputs) {
    const auto is_its = [&](const at::Tensor& read) { return same_storage(read, output); };
    if (output.defined() && output.has_storage() && std::none_of(access.reads.begin(), access.reads.end(), is_its)) {
      made_by_update_.insert(output.storage());
    }
  }
}

void WholeStepWatch::before(const OperatorAccess& access) const {
  for (const at::Tensor& written : access.writes) {
    if (updating_ && written.has_storage() && made_by_updates_.contains(written.storage().unsafeGetStorageImpl())) {
      throw CaptureError("graphed step \"" + name_ + "\": its update keeps state that it made in the warm-up (" +
                         access.name +
                         " writes it), and the graph would continue from that state; torch::optim::SGD with momentum "
                         "does so. Make such state before the step is captured, as sidestream::AdamW does");
    }
  }
  if (updating_) {
    refuse_frozen_gradient(access);
  }
  const std::string_view name = access.name;
  if (name == "aten::_local_scalar_dense" && !captures_ &&
      std::any_of(access.reads.begin(), access.reads.end(), [](const at::Tensor& read) { return !read.is_cpu(); })) {
    throw CaptureError(
        "graphed step \"" + name_ +
        "\": it reads a device value on the host (item()), which a graph cannot do. torch::nn::utils::clip_grad_norm_ "
        "does so: use sidestream::clip_grad_norm_, which returns the norm as a tensor, or read values after the step");
  }
  // LibTorch's Adam, AdamW, Adagrad and RMSprop end in it, with the learning rate and what they count on the host as a number.
  if (name == "aten::addcdiv_" && writes_parameter(access)) {
    throw CaptureError("graphed step \"" + name_ +
                       "\": it updates a parameter by addcdiv_, as torch::optim::AdamW, Adam, Adagrad and RMSprop do. "
                       "Their learning rate and step count are numbers on the host, which a graph would freeze; use "
                       "sidestream::AdamW, or call the optimizer after the step");
  }
}

}  // namespace sidestream
