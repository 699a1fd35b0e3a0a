#include "sim/torch/issued_kernel.h"

#include <memory>
#include <utility>

#include <ATen/core/grad_mode.h>

namespace sidestream::sim {

void IssuedKernel::run() const {
  const KernelScope scope;
  const at::AutoGradMode mode(with_gradients);
  const OperatorMemory memory(allocations);
  torch::jit::Stack stack = arguments;
  if (!first_state) {
    kernel(op, stack);
  } else {
    std::optional<GeneratorState> repeated;
    GeneratorState* state = ReplayState::current();
    if (state == nullptr) {
      state = &repeated.emplace(*first_state);
    }
    const DrawsFrom draws(*state, through);
    if (generator_argument >= 0) {
      stack[static_cast<std::size_t>(generator_argument)] = draws.generator();
    }
    kernel(op, stack);
  }
  stack.clear();
  memory.check_all_used(name);
}

std::function<void()> IssuedKernel::as_function() && {
  return [kernel = std::make_shared<const IssuedKernel>(std::move(*this))] { kernel->run(); };
}

}  // namespace sidestream::sim
