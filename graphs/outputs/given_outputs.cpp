#include "graphs/outputs/given_outputs.h"

#include <c10/util/irange.h>
#include <torch/csrc/autograd/variable.h>

#include "sidestream/error.h"

namespace sidestream {
namespace {

at::Tensor view_of_input(const CapturedCall& call, std::size_t index, const at::Tensor& input) {
  const StaticOutput& output = call.outputs[index];
  const at::Tensor& captured = call.inputs[output.of].tensor;
  return input.as_strided(output.tensor.sizes(), output.tensor.strides(),
                          output.tensor.storage_offset() - captured.storage_offset() + input.storage_offset());
}

}  // namespace

void check_views_of_inputs(const CapturedCall& call, c10::ArrayRef<at::Tensor> inputs) {
  for (const auto i : c10::irange(call.outputs.size())) {
    const StaticOutput& output = call.outputs[i];
    if (output.kind == StaticOutput::Kind::view_of_input &&
        inputs[output.of].strides() != call.inputs[output.of].tensor.strides()) {
      throw UsageError(
          "graphed call \"" + call.spec.name + "\": output " + std::to_string(i) + " is a view of input " +
          std::to_string(output.of) +
          ", which has other strides than it was captured with; pass it contiguous, or clone it in the call");
    }
  }
}

void give_outputs(CapturedCall& call, c10::ArrayRef<at::Tensor> inputs, c10::Stream current,
                  detail::TensorBuffer& outputs) {
  for (const auto i : c10::irange(call.outputs.size())) {
    const StaticOutput& output = call.outputs[i];
    switch (output.kind) {
      case StaticOutput::Kind::none:
        outputs.emplace_back();
        break;
      case StaticOutput::Kind::made:
        outputs.push_back(output.view.restore(call.output_storages[output.of].give(current)));
        if (output.shares_version_with < i) {
          torch::autograd::impl::set_version_counter(
              outputs[i], torch::autograd::impl::version_counter(outputs[output.shares_version_with]));
        }
        break;
      case StaticOutput::Kind::earlier_output:
        outputs.push_back(outputs[output.of]);
        break;
      case StaticOutput::Kind::input:
        outputs.push_back(inputs[output.of]);
        break;
      case StaticOutput::Kind::view_of_input:
        outputs.push_back(view_of_input(call, i, inputs[output.of]));
        break;
      case StaticOutput::Kind::other:
        outputs.push_back(output.owner);
        break;
      case StaticOutput::Kind::view_of_other:
        outputs.push_back(
            output.owner.as_strided(output.tensor.sizes(), output.tensor.strides(), output.tensor.storage_offset()));
        break;
    }
  }
}

}  // namespace sidestream
