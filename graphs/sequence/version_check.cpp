#include "graphs/sequence/version_check.h"

#include <c10/util/irange.h>

#include "sidestream/error.h"

namespace sidestream {

void stamp_versions(CapturedCall& call, c10::ArrayRef<at::Tensor> inputs, const detail::TensorBuffer& outputs) {
  for (const std::size_t i : call.stamped_inputs) {  // what else is saved was copied: the caller's own may change
    call.inputs[i].version = VersionStamp(inputs[i]);
  }
  for (const auto i : c10::irange(call.outputs.size())) {
    StaticOutput& output = call.outputs[i];
    if (output.saved || output.overlaps) {
      output.version = VersionStamp(outputs[i]);
    }
  }
}

void check_versions(const CapturedCall& call) {
  const auto changed = [&](const char* what, std::size_t index, const char* why) {
    throw UsageError("graphed call \"" + call.spec.name + "\": " + what + std::to_string(index) +
                     " was changed in place before its backward, " + why + ": clone it before the in-place operation");
  };
  for (const std::size_t i : call.stamped_inputs) {
    if (!call.inputs[i].version.unchanged()) {
      changed("input ", i, "which needs it");
    }
  }
  for (const auto i : c10::irange(call.outputs.size())) {
    const StaticOutput& output = call.outputs[i];
    if ((output.saved || output.overlaps) && !output.version.unchanged()) {
      changed(
          "output ", i,
          output.saved ? "which needs it" : "and shares memory with another output, whose gradient would miss that");
    }
  }
}

}  // namespace sidestream
