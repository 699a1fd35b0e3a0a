#include "graphs/capture/pass_hooks.h"

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "observe/operator_observer.h"
#include "offload/saved_tensor_recorder.h"

namespace sidestream {

void PassHooks::before_forward() const {
  if (hooks_ != nullptr) {
    run(hooks_->before_forward());
  }
}

void PassHooks::after_forward() const {
  if (hooks_ != nullptr) {
    run(hooks_->after_forward());
  }
}

void PassHooks::before_backward() const {
  if (hooks_ != nullptr) {
    run(hooks_->before_backward());
  }
}

void PassHooks::after_backward() const {
  if (hooks_ != nullptr) {
    run(hooks_->after_backward());
  }
}

void PassHooks::run(const std::function<void()>& hook) const {
  if (!hook) {
    return;
  }
  const auto meet = [this](c10::ArrayRef<at::Tensor> tensors) {
    for (const at::Tensor& tensor : tensors) {
      if (tensor.defined() && tensor.has_storage()) {
        met_.insert(tensor.storage());
      }
    }
  };
  const RecorderGuard no_recorder(nullptr);
  const OperatorObserverGuard observer([&](const OperatorAccess& access) {
    meet(access.reads);
    meet(access.outputs);
  });
  hook();
  observer.rethrow();
}

}  // namespace sidestream
