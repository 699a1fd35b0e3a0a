#include "graphs/guards/body_arguments.h"

namespace sidestream {

std::vector<at::Tensor> arguments_of(const CallSpec& spec, const std::vector<at::Tensor>& leaves) {
  std::vector<at::Tensor> arguments = leaves;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const CallInput& input = spec.inputs[i];
    if (input.aliases && input.aliases->same_as != i) {
      arguments[i] = arguments[input.aliases->same_as];
    } else if (leaves[i].defined() && leaves[i].requires_grad() && !input.shared_cast) {
      arguments[i] = leaves[i].view_as(leaves[i]);
    }
  }
  return arguments;
}

}  // namespace sidestream
