#include "graphs/entry/bucket_pass.h"

#include <utility>

#include <c10/util/irange.h>

#include "graphs/guards/call_spec.h"

namespace sidestream {

void BucketPass::begin() {
  stop();
  begun_ = true;
}

void BucketPass::stop() noexcept {
  noted_.clear();
  given_.clear();
  begun_ = false;
}

bool BucketPass::is_output(const at::Tensor& input, const Sample& link) const {
  if (!input.defined() || link.callable() < 0 || link.callable() >= static_cast<std::int64_t>(given_.size())) {
    return false;
  }
  const auto& outputs = given_[static_cast<std::size_t>(link.callable())];
  return link.output() < static_cast<std::int64_t>(outputs.size()) &&
         outputs[static_cast<std::size_t>(link.output())]._unsafe_get_target() == input.unsafeGetTensorImpl() &&
         !outputs[static_cast<std::size_t>(link.output())].expired();
}

void BucketPass::note(const Tensors& inputs) {
  const std::vector<Sample>& links = links_[noted_.size()];
  std::vector<Argument> arguments(inputs.size());
  for (const auto i : c10::irange(inputs.size())) {
    if (i < links.size() && is_output(inputs[i], links[i])) {
      arguments[i].callable = links[i].callable();
      arguments[i].output = links[i].output();
    } else if (inputs[i].defined()) {
      arguments[i].input = sample_of(inputs[i], device_);
      arguments[i].is_leaf = inputs[i].is_leaf();
    }
  }
  noted_.push_back(std::move(arguments));
}

void BucketPass::gave(const Tensors& outputs) {
  auto& given = given_.emplace_back();
  for (const at::Tensor& output : outputs) {
    given.emplace_back(output.getIntrusivePtr());
  }
}

std::vector<std::vector<Sample>> BucketPass::take() {
  std::vector<std::vector<Sample>> samples;
  for (const std::vector<Argument>& arguments : noted_) {
    std::vector<Sample>& of_callable = samples.emplace_back();
    for (const Argument& argument : arguments) {
      if (argument.callable >= 0) {
        of_callable.push_back(Sample::output_of(argument.callable, argument.output));
        continue;
      }
      at::Tensor sample = argument.input.sample.defined() ? sample_on(device_, argument.input) : at::Tensor();
      // Autocast casts a leaf that requires a gradient once for all its uses, and what is none at each.
      of_callable.emplace_back(argument.is_leaf ? std::move(sample) : sample.view_as(sample));
    }
  }
  stop();
  return samples;
}

}  // namespace sidestream
