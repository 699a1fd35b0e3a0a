#include "graphs/outputs/static_tensors.h"

#include <c10/util/irange.h>
#include <torch/csrc/autograd/variable.h>

#include "graphs/guards/input_facts.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

at::Tensor view_of_input(const StaticOutput& output, const at::Tensor& captured, const at::Tensor& input) {
  const at::Tensor base = output.detached ? input.detach() : input;
  return base.as_strided(output.tensor.sizes(), output.tensor.strides(),
                         output.tensor.storage_offset() - captured.storage_offset() + input.storage_offset());
}

}  // namespace

void check_views_of_inputs(const std::string& name, const std::vector<StaticOutput>& outputs,
                           const std::vector<StaticInput>& held, c10::ArrayRef<at::Tensor> inputs) {
  for (const auto i : c10::irange(outputs.size())) {
    const StaticOutput& output = outputs[i];
    if (output.kind == StaticOutput::Kind::view_of_input && !same_strides(inputs[output.of], held[output.of].tensor)) {
      throw UsageError(
          "graphed call \"" + name + "\": output " + std::to_string(i) + " is a view of input " +
          std::to_string(output.of) +
          ", which has other strides than it was captured with; pass it contiguous, or clone it in the call");
    }
  }
}

void give_outputs(const std::vector<StaticOutput>& outputs, std::vector<OutputStorage>& storages,
                  const std::vector<StaticInput>& held, c10::ArrayRef<at::Tensor> inputs, c10::Stream current,
                  detail::TensorBuffer& given) {
  for (const auto i : c10::irange(outputs.size())) {
    const StaticOutput& output = outputs[i];
    switch (output.kind) {
      case StaticOutput::Kind::none:
        given.emplace_back();
        break;
      case StaticOutput::Kind::made:
        given.push_back(output.view.restore(storages[output.of].give(current)));
        if (output.shares_version_with < i) {
          torch::autograd::impl::set_version_counter(
              given[i], torch::autograd::impl::version_counter(given[output.shares_version_with]));
        }
        break;
      case StaticOutput::Kind::earlier_output:
        given.push_back(given[output.of]);
        break;
      case StaticOutput::Kind::input:
        given.push_back(inputs[output.of]);
        break;
      case StaticOutput::Kind::view_of_input:
        given.push_back(view_of_input(output, held[output.of].tensor, inputs[output.of]));
        break;
      case StaticOutput::Kind::other:
        given.push_back(output.detached ? output.owner.detach() : output.owner);
        break;
      case StaticOutput::Kind::view_of_other:
        given.push_back(
            output.owner.as_strided(output.tensor.sizes(), output.tensor.strides(), output.tensor.storage_offset()));
        break;
    }
  }
}

}  // namespace sidestream
