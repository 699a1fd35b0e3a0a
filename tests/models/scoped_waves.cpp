#include "models/scoped_waves.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/autograd.h>

#include "sidestream/call.h"
#include "sidestream/scope.h"

namespace sidestream::testing_model {

at::Tensor scoped_wave_gradient(const at::Tensor& x) {
  constexpr const char* names[kWaves] = {"waves.0", "waves.1", "waves.2", "waves.3", "waves.4", "waves.5"};
  const auto wave = [](const at::Tensor& h) {
    const OffloadScope scope("act");
    return h.exp().mul(0.1).tanh();
  };
  at::Tensor h = x;
  for (const char* name : names) {
    h = call(name, wave, h);
  }
  return torch::autograd::grad({h.sum()}, {x})[0];
}

at::Tensor scoped_wave_input(std::uint64_t n, std::int64_t rows, c10::Device device) {
  auto generator = at::detail::createCPUGenerator(40 + n);
  return at::randn({rows, 64}, generator).to(device).requires_grad_(true);
}

Options scoped_wave_options(c10::Device device, std::int64_t side_streams) {
  Options options(device);
  options.min_bytes(1024).offload("**");
  return side_streams > 0 ? options.graph("waves.*").graph_options(GraphOptions().side_streams(side_streams))
                          : options.groups_in_flight(1);
}

}  // namespace sidestream::testing_model
