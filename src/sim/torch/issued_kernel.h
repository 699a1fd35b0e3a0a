#pragma once
#include <functional>
#include <optional>
#include <vector>

#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "observe/operator_observer.h"
#include "sim/torch/cpu_allocator.h"
#include "sim/torch/generator.h"
#include "sim/torch/operators.h"

namespace sidestream::sim {

/// For its lifetime the calling thread's LibTorch calls go to the CPU's kernels alone: no autograd, views tracking or
/// autocast, and no observer, which a GPU's kernels know nothing of either.
class [[nodiscard]] KernelScope {
 public:
  KernelScope() : guard_(c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset) {}

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
  UnobservedGuard unobserved_;
};

/// A kernel that has run once, with what it takes to run it again on the same bytes. Its tensors own no device memory.
struct IssuedKernel {
  c10::OperatorHandle op;
  CpuKernel kernel;
  const char* name;
  torch::jit::Stack arguments;
  std::vector<Allocation> allocations;
  std::optional<GeneratorState> first_state;  ///< of a random kernel: what its first run drew from
  int generator_argument = -1;
  DrawsFrom::Through through = DrawsFrom::Through::argument;
  bool with_gradients =
      false;  ///< at::GradMode in the first run: an LSTM's kernel allocates what backward needs only then

  /// Runs the kernel again. Threads: any, one at a time. Throws: Error when it allocates otherwise than in its first run.
  void run() const;
  [[nodiscard]] std::function<void()> as_function() &&;
};

}  // namespace sidestream::sim
