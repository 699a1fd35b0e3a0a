#include <c10/util/irange.h>

#include "base/site.h"
#include "graphs/capture/sequence_capture.h"
#include "graphs/guards/call_spec.h"
#include "graphs/outputs/storage_holders.h"
#include "graphs/sandbox/sandbox.h"
#include "sidestream/error.h"

namespace sidestream {

namespace {

/// Throws: CaptureError if a body keeps an output whose memory other graphs use by now.
void refuse_released(const CapturedSequence& sequence, const std::vector<CaptureReads::Made>& kept) {
  for (const ReleasedOutput& released : sequence.released_outputs) {
    const Link& output = released.output;
    const CapturedCall& call = sequence.calls[output.call];
    for (const CaptureReads::Made& made : kept) {
      if (call.output_storages[output.index].is(made.storage)) {
        throw CaptureError(sequence.describe(output.call) + ": it keeps an output of " +
                           std::to_string(made.storage.nbytes()) +
                           " bytes from call to call, but did not keep it in its earlier run. Keep the output in each "
                           "run, or keep a clone");
      }
    }
  }
}

/// The report tells which calls keep tensors that they make.
void note_kept(CapturedSequence& sequence, const std::vector<CaptureReads::Made>& kept) {
  for (const auto i : c10::irange(sequence.calls.size())) {
    std::size_t bytes = 0;
    for (const CaptureReads::Made& made : kept) {
      bytes += made.call == i ? made.storage.nbytes() : 0;
    }
    if (bytes > 0) {
      sequence.plan.notes.push_back(
          sequence.describe(i) + " keeps tensors that it makes (" + std::to_string(bytes) +
          " bytes): each replay overwrites them, and an eager run of the call makes new ones. "
          "If the program reads them, return them as outputs");
    }
  }
}

/// Throws: CaptureError if a body replaces a tensor that it reads by a new one.
void refuse_replaced(const CapturedSequence& sequence, const std::vector<CaptureReads::Made>& kept,
                     const StorageHolders& holders) {
  for (const CaptureReads::Made& made : kept) {
    for (const c10::Storage& external : sequence.calls[made.call].reads.externals) {
      // If only graphs hold it, the module freed it while they were captured.
      if (external.nbytes() == made.storage.nbytes() && !holders.others_hold(external)) {
        throw CaptureError(
            sequence.describe(made.call) + ": it reads a tensor of " + std::to_string(external.nbytes()) +
            " bytes that it keeps from call to call, and then keeps a new tensor instead; graphs would always read " +
            "the first tensor. Register the tensor as a buffer and change it in place (copy_, add_)");
      }
    }
  }
}

}  // namespace

// Note [Tensors that a module keeps]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// A module may keep what its forward makes: attention weights to look at, or a mask for the latest length, which calls of two lengths
// replace by turns. If a capture makes such a tensor, it lies in the pool of the graphs, and each replay writes it. After the first
// replay its value is that of plain training. But a capture computes nothing, and the tensor may be read before that replay: by an
// eager call, or by the warm-up of another capture, whose graphs then read it. So all forwards are launched once to fill these tensors.
// Other memory that they write is put back.
void fill_kept_tensors(SequenceCapture& capture) {
  std::vector<CaptureReads::Made> kept = capture.reads.kept_by_others(capture.sequence.calls, capture.holders);
  if (!kept.empty()) {  // autograd's thread may be the holder
    kept.clear();
    await_end_of_backward(capture.runtime.device());
    kept = capture.reads.kept_by_others(capture.sequence.calls, capture.holders);
  }
  if (kept.empty()) {
    return;
  }
  if (capture.sequence.memory->shared()) {
    throw CaptureError(capture.sequence.describe(kept.front().call) + ": it keeps a tensor of " +
                       std::to_string(kept.front().storage.nbytes()) +
                       " bytes that it made, but graphs of other captures write the same memory. Return the tensor as "
                       "an output, or capture without a shared pool");
  }
  refuse_released(capture.sequence, kept);
  const StreamGuard on_capture(capture.runtime, capture.stream);
  Sandbox sandbox;
  sandbox.draw_apart(generators_of(capture.specs, capture.runtime.device()));
  for (const c10::Storage& storage : capture.reads.written()) {
    sandbox.keep_bytes(storage);
  }
  for (const CapturedCall& call : capture.sequence.calls) {
    const Site site(Activity::warmup, call.spec.scope->site);
    capture.runtime.launch(call.forward.graph, capture.stream);
  }
  sandbox.put_back();
  capture.runtime.synchronize_device();
  refuse_replaced(capture.sequence, kept, capture.holders);  // after all that: what the module keeps now has a value
  note_kept(capture.sequence, kept);
}

}  // namespace sidestream
