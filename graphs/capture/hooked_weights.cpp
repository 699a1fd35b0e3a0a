// Weights that capture-time hooks put elsewhere: gathered for a pass, and scattered behind it.
#include <c10/util/irange.h>

#include "graphs/capture/sequence_capture.h"
#include "sidestream/error.h"

namespace sidestream {

void SequenceCapture::check_hooked_weights(std::size_t index) const {
  if (chain_.layers_[index].spec.hooks != nullptr && chain_.change(index).stale()) {
    throw CaptureError("its capture-time hooks placed weights at other addresses for backward than for forward (" +
                       chain_.difference(index) +
                       "). A replay reads the same addresses in forward and backward; let before_forward and "
                       "before_backward place the weights in the same memory");
  }
}

void SequenceCapture::settle_hooked_weights() {
  for (const auto i : c10::irange(specs_.size())) {
    CapturedCall& layer = chain_.layers_[i];
    if (layer.spec.hooks != nullptr) {
      CaptureReads::let_go_of_registered(layer);
      layer.placed_by_hooks = chain_.change(i).stale();
    }
  }
}

}  // namespace sidestream
