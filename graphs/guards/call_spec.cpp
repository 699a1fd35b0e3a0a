#include "graphs/guards/call_spec.h"

#include <ATen/core/grad_mode.h>

#include "memory/storage_view.h"

namespace sidestream {

CallInput sample_of(const at::Tensor& input, c10::Device device) {
  const at::NoGradGuard no_grad;
  CallInput sample;
  // A copy to the host would resolve a pending conjugation or negation of a view. Another device is refused by name later.
  sample.on_host = StorageView::supported(input) && input.device() == device && !input.is_conj() && !input.is_neg();
  sample.sample = sample.on_host ? input.detach().to(at::kCPU) : input.detach().clone();
  sample.sample.requires_grad_(input.requires_grad());
  return sample;
}

at::Tensor sample_on(c10::Device device, const CallInput& input) {
  if (!input.on_host) {
    return input.sample;
  }
  const at::NoGradGuard no_grad;
  return input.sample.detach().to(device).requires_grad_(input.sample.requires_grad());
}

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
