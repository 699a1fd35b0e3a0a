#include "graphs/replay/version_check.h"

#include <c10/util/irange.h>

#include "sidestream/error.h"

namespace sidestream {

void stamp_versions(Layer& layer, c10::ArrayRef<at::Tensor> inputs, const detail::TensorBuffer& outputs) {
  for (const auto i : c10::irange(layer.inputs.size())) {
    StaticInput& input = layer.inputs[i];
    if (input.saved && input.from) {  // else it was copied: the caller's own may change
      input.version = VersionStamp(inputs[i]);
    }
  }
  for (const auto i : c10::irange(layer.outputs.size())) {
    StaticOutput& output = layer.outputs[i];
    if (output.saved || output.overlaps) {
      output.version = VersionStamp(outputs[i]);
    }
  }
}

void check_versions(const Layer& layer) {
  const auto changed = [&](const char* what, std::size_t index, const char* why) {
    throw UsageError("graphed call \"" + layer.spec.name + "\": " + what + std::to_string(index) +
                     " was changed in place before its backward, " + why + ": clone it before the in-place operation");
  };
  for (const auto i : c10::irange(layer.inputs.size())) {
    const StaticInput& input = layer.inputs[i];
    if (input.saved && input.from && !input.version.unchanged()) {
      changed("input ", i, "which needs it");
    }
  }
  for (const auto i : c10::irange(layer.outputs.size())) {
    const StaticOutput& output = layer.outputs[i];
    if ((output.saved || output.overlaps) && !output.version.unchanged()) {
      changed(
          "output ", i,
          output.saved ? "which needs it" : "and shares memory with another output, whose gradient would miss that");
    }
  }
}

}  // namespace sidestream
