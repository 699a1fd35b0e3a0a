#pragma once
#include <memory>

#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "base/thread_stack.h"

namespace sidestream {

/// Gives autograd the hooks of each tensor it saves.
class SavedTensorSource {
 public:
  SavedTensorSource() = default;
  SavedTensorSource(const SavedTensorSource&) = delete;
  SavedTensorSource& operator=(const SavedTensorSource&) = delete;
  virtual ~SavedTensorSource() = default;

  /// Hooks for the one tensor that is being saved now; null saves the tensor without hooks. Called on the thread that runs the operator.
  /// Autograd then calls `call_pack_hook` at once, without grad mode, and `call_unpack_hook` once per backward, possibly on its device
  /// thread. A tensor whose hooks exist has no version check. The pack hook is given the variable itself, with its grad_fn (LibTorch
  /// 2.11; wrapped numbers are never hooked). It must not keep the variable: if an operator saves its own output, that would be a cycle.
  /// Keep the storage, or `detach()`. Its exceptions reach the caller of the operator with their type.
  [[nodiscard]] virtual std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() = 0;
};

/// Makes `source` the calling thread's source of hooks for its lifetime; null means that nothing inside is hooked.
/// Nests; guards may end in any order, and the latest that has not ended is in force.
/// Threads: only the calling one; autograd's device threads have no source unless one is set there.
/// Without a source a saved tensor costs one virtual call and one branch, and allocates nothing.
class [[nodiscard]] SavedTensorGuard {
 public:
  /// `pool`: see ThreadStack::Entry.
  explicit SavedTensorGuard(SavedTensorSource* source, BlockPool* pool = nullptr) : entry_(source, pool) {}
  SavedTensorGuard(const SavedTensorGuard&) = delete;
  SavedTensorGuard& operator=(const SavedTensorGuard&) = delete;
  ~SavedTensorGuard() = default;

 private:
  ThreadStack<SavedTensorSource>::Entry entry_;
};

/// The calling thread's source; null if there is none.
[[nodiscard]] SavedTensorSource* current_saved_tensor_source() noexcept;

/// Puts our autograd engine, the base engine plus saved-tensor hooks, in the place of LibTorch's default one for the whole
/// process, and checks that hooks fire. Later calls check only that it is still in place and has device threads.
/// Call before the first backward pass whose saved tensors matter; graphs built earlier still run.
/// Threads: any. Throws: UsageError when another engine (Python's) holds the seam or this LibTorch calls no hooks.
void install_autograd_engine();

/// Runs one tiny operator on the CPU, forward and backward, and sees whether pack and unpack were called.
/// Throws: UsageError when not: says what was missing.
void check_saved_tensor_seam();

}  // namespace sidestream
