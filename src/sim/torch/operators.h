#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

namespace sidestream::sim {

/// Computes an operator: pops the operator's arguments off the stack as CPU tensors and pushes its results.
using CpuKernel = void (*)(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// Runs `kernel` for `op` on aliases of the arguments on `stack`, which its results replace. It runs at once, after everything that its
/// stream is ordered after, and is handed to Device::issued if work is kept. Results keep the kernel's own blocks.
/// Capture: legal, except for operators whose result the host needs.
/// Threads: any.  Throws: UsageError for view operators without a kernel of their own, tensors of different devices and layouts other than
/// strided; CaptureError if the capture forbids it; errors of the kernel.
void issue_operator(const c10::OperatorHandle& op, CpuKernel kernel, torch::jit::Stack& stack);

/// The kernel that LibTorch has for CPU tensors.
void run_cpu_kernel(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// `kernel` in the form that LibTorch's dispatcher registers.
template <CpuKernel kernel>
void boxed(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
  issue_operator(op, kernel, *stack);
}
template <CpuKernel kernel>
[[nodiscard]] torch::CppFunction boxed_kernel() {
  return torch::CppFunction::makeFromBoxedFunction<&boxed<kernel>>();
}

/// Registers the fallback for all operators. Also registers that kernel in front of LibTorch's own decompositions, if the CPU has a
/// kernel that does not decompose. So both devices run the same arithmetic. Called once, by register_sim_device.
void register_operators(torch::Library& all, torch::Library& aten);

}  // namespace sidestream::sim
