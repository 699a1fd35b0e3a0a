// Weights that capture-time hooks put elsewhere: gathered for a pass, and scattered behind it.
#include <c10/util/irange.h>

#include "graphs/capture/sequence_capture.h"
#include "sidestream/error.h"

namespace sidestream {

void SequenceCapture::check_hooked_weights(std::size_t index) const {
  if (sequence_.calls_[index].spec.hooks != nullptr && sequence_.change(index).stale()) {
    throw CaptureError("its capture-time hooks placed weights at other addresses for backward than for forward (" +
                       sequence_.difference(index) +
                       "). A replay reads the same addresses in forward and backward; let before_forward and "
                       "before_backward place the weights in the same memory");
  }
}

void SequenceCapture::settle_hooked_weights() {
  for (const auto i : c10::irange(specs_.size())) {
    CapturedCall& call = sequence_.calls_[i];
    if (call.spec.hooks != nullptr) {
      CaptureReads::let_go_of_registered(call);
      call.placed_by_hooks = sequence_.change(i).stale();
    }
  }
}

}  // namespace sidestream
