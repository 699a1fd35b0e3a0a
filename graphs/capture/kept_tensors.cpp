#include <c10/util/irange.h>

#include "base/site.h"
#include "graphs/capture/sequence_capture.h"
#include "graphs/guards/call_generators.h"
#include "graphs/outputs/end_of_backward.h"
#include "graphs/sandbox/sandbox.h"
#include "sidestream/error.h"

namespace sidestream {

// Note [Tensors that a module keeps]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A module may keep what its forward makes: attention weights to look at, or a mask for the latest length, which calls of two lengths
// replace by turns. If a capture makes such a tensor, it lies in the pool of the graphs, and each replay writes it. After the first
// replay its value is that of plain training. But a capture computes nothing, and the tensor may be read before that replay: by an
// eager call, or by the warm-up of another capture, whose graphs then read it. So all forwards are launched once to fill these tensors.
// Other memory that they write is put back.
void SequenceCapture::fill_kept_tensors() {
  std::vector<CaptureReads::Made> kept = reads_.kept_by_others(sequence_.calls, holders_);
  if (!kept.empty()) {  // autograd's thread may be the holder
    kept.clear();
    await_end_of_backward(runtime_.device());
    kept = reads_.kept_by_others(sequence_.calls, holders_);
  }
  if (kept.empty()) {
    return;
  }
  if (sequence_.memory->shared()) {
    throw CaptureError(sequence_.describe(kept.front().call) + ": it keeps a tensor of " +
                       std::to_string(kept.front().storage.nbytes()) +
                       " bytes that it made, but graphs of other captures write the same memory. Return the tensor as "
                       "an output, or capture without a shared pool");
  }
  refuse_released(kept);
  const StreamGuard on_capture(runtime_, capture_);
  Sandbox sandbox;
  sandbox.draw_apart(generators_of(specs_, runtime_.device()));
  for (const c10::Storage& storage : reads_.written()) {
    sandbox.keep_bytes(storage);
  }
  for (const CapturedCall& call : sequence_.calls) {
    const Site site(Activity::warmup, call.spec.scope->site);
    runtime_.launch(call.forward.graph, capture_);
  }
  sandbox.put_back();
  runtime_.synchronize_device();
  refuse_replaced(kept);  // after all that: what the module keeps now has a value
  note_kept(kept);
}

void SequenceCapture::refuse_released(const std::vector<CaptureReads::Made>& kept) const {
  for (const ReleasedOutput& released : sequence_.released_outputs) {
    const Link& output = released.output;
    const CapturedCall& call = sequence_.calls[output.call];
    for (const CaptureReads::Made& made : kept) {
      if (call.output_storages[output.index].is(made.storage)) {
        throw CaptureError(sequence_.describe(output.call) + ": it keeps an output of " +
                           std::to_string(made.storage.nbytes()) +
                           " bytes from call to call, but did not keep it in its earlier run. Keep the output in each "
                           "run, or keep a clone");
      }
    }
  }
}

void SequenceCapture::note_kept(const std::vector<CaptureReads::Made>& kept) {
  for (const auto i : c10::irange(sequence_.calls.size())) {
    std::size_t bytes = 0;
    for (const CaptureReads::Made& made : kept) {
      bytes += made.call == i ? made.storage.nbytes() : 0;
    }
    if (bytes > 0) {
      sequence_.plan.notes.push_back(
          sequence_.describe(i) + " keeps tensors that it makes (" + std::to_string(bytes) +
          " bytes): each replay overwrites them, and an eager run of the call makes new ones. "
          "If the program reads them, return them as outputs");
    }
  }
}

void SequenceCapture::refuse_replaced(const std::vector<CaptureReads::Made>& kept) const {
  for (const CaptureReads::Made& made : kept) {
    for (const c10::Storage& external : sequence_.calls[made.call].reads.externals) {
      // If only graphs hold it, the module freed it while they were captured.
      if (external.nbytes() == made.storage.nbytes() && !holders_.others_hold(external)) {
        throw CaptureError(
            sequence_.describe(made.call) + ": it reads a tensor of " + std::to_string(external.nbytes()) +
            " bytes that it keeps from call to call, and then keeps a new tensor instead; graphs would always read " +
            "the first tensor. Register the tensor as a buffer and change it in place (copy_, add_)");
      }
    }
  }
}

}  // namespace sidestream
