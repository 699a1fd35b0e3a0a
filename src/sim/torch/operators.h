#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

namespace sidestream::sim {

/// What computes an operator: takes the operator's arguments off the stack as CPU tensors and leaves its results there.
using CpuKernel = void (*)(const c10::OperatorHandle& op, torch::jit::Stack& stack);

/// Runs `kernel` for `op` on aliases of the arguments on `stack`, which its results replace: at once, after everything its
/// stream is ordered after, and handed to Device::issued where work is kept. Results take the kernel's own blocks.
/// Capture: legal, but for operators whose result the host needs.
/// Threads: any.  Throws: UsageError for view operators without a kernel of their own, tensors of different devices and
/// layouts other than strided; CaptureError where the capture forbids it; whatever the kernel throws.
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

/// Registers the fallback for all operators, and the same kernel in front of LibTorch's own decompositions wherever the CPU
/// has a kernel that does not decompose, so that both devices run the same arithmetic. Called once, by register_sim_device.
void register_operators(torch::Library& all, torch::Library& aten);

}  // namespace sidestream::sim
