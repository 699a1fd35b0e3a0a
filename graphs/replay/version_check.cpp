#include "graphs/replay/version_check.h"

#include <c10/util/irange.h>

#include "sidestream/error.h"

namespace sidestream {

void stamp_versions(Layer& layer, c10::ArrayRef<at::Tensor> inputs, const detail::TensorBuffer& outputs) {
  for (const std::size_t i : layer.stamped_inputs) {  // what else is saved was copied: the caller's own may change
    layer.inputs[i].version = VersionStamp(inputs[i]);
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
  for (const std::size_t i : layer.stamped_inputs) {
    if (!layer.inputs[i].version.unchanged()) {
      changed("input ", i, "which needs it");
    }
  }
  for (const auto i : c10::irange(layer.outputs.size())) {
    const StaticOutput& output = layer.outputs[i];
    if ((output.saved || output.overlaps) && !output.version.unchanged()) {
      changed(
          "output ", i,
          output.saved ? "which needs it" : "and it shares memory with another output, whose gradient would be wrong");
    }
  }
}

}  // namespace sidestream
