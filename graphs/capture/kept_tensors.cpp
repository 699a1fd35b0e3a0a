#include <algorithm>
#include <cstddef>
#include <set>
#include <string>
#include <vector>

#include <c10/util/irange.h>

#include "base/site.h"
#include "graphs/capture/sequence_capture.h"
#include "graphs/guards/call_spec.h"
#include "graphs/outputs/storage_holders.h"
#include "graphs/sandbox/sandbox.h"
#include "sidestream/error.h"

namespace sidestream {

namespace {

/// A call whose body keeps a storage.
struct Keeper {
  std::size_t call;
  const c10::StorageImpl* in_sizing = nullptr;  ///< what its sizing pass kept in place of it; only to compare
};

/// The calls whose bodies keep `made`, as their sizing passes showed; else the call that made it. An output may be kept by a call that
/// takes it.
std::vector<Keeper> keepers_of(const SequenceCapture& capture, const CaptureReads::Made& made) {
  const auto lies_there = [&](const Link& output) {
    const CapturedCall& call = capture.sequence.calls[output.call];
    const StaticOutput* const given = output.index < call.outputs.size() ? &call.outputs[output.index] : nullptr;
    return given != nullptr && given->kind == StaticOutput::Kind::made &&
           call.output_storages[given->of].is(made.storage);
  };
  std::vector<Keeper> keepers;
  for (const auto i : c10::irange(capture.sizings.size())) {
    const LinkedOutputs::Use& use = capture.sizings[i].outputs;
    for (const auto k : c10::irange(use.kept.size())) {
      if (lies_there(use.kept[k])) {
        keepers.push_back({i, use.kept_storages[k]._unsafe_get_target()});
      }
    }
  }
  return keepers.empty() ? std::vector<Keeper>{{made.call}} : keepers;
}

/// The calls that take outputs of `call` that lie in `storage`: ", or by "a" or "b", which take it".
std::string describe_takers(const CapturedSequence& sequence, const CapturedCall& call, std::size_t storage) {
  std::set<std::size_t> takers;
  for (const StaticOutput& output : call.outputs) {
    if (output.kind == StaticOutput::Kind::made && output.of == storage) {
      for (const Link& reader : output.readers) {
        takers.insert(reader.call);
      }
    }
  }
  std::string names;
  for (const std::size_t taker : takers) {
    names += (names.empty() ? ", or by " : " or ") + sequence.describe(taker);
  }
  return names.empty() ? names : names + ", which takes it";
}

/// Throws: CaptureError if a body keeps an output whose memory other graphs use by now. No sizing pass has shown which body it is.
void refuse_released(const CapturedSequence& sequence, const std::vector<CaptureReads::Made>& kept) {
  for (const ReleasedOutput& released : sequence.released_outputs) {
    const Link& output = released.output;
    const CapturedCall& call = sequence.calls[output.call];
    for (const CaptureReads::Made& made : kept) {
      if (call.output_storages[output.index].is(made.storage)) {
        throw CaptureError(sequence.describe(output.call) + ": its output of " + std::to_string(made.storage.nbytes()) +
                           " bytes is kept from call to call by the call itself" +
                           describe_takers(sequence, call, output.index) +
                           ". The call that keeps it did not keep it in its earlier run. Detach or clone what the "
                           "member keeps, or keep it in each run");
      }
    }
  }
}

/// The report tells which calls keep tensors that graphs write.
void note_kept(SequenceCapture& capture, const std::vector<CaptureReads::Made>& kept) {
  for (const auto i : c10::irange(capture.sequence.calls.size())) {
    std::size_t own = 0;
    std::size_t taken = 0;
    for (const CaptureReads::Made& made : kept) {
      if (keepers_of(capture, made).front().call == i) {
        (made.call == i ? own : taken) += made.storage.nbytes();
      }
    }
    const auto note = [&](std::size_t bytes, const char* what) {
      if (bytes > 0) {
        capture.sequence.plan.notes.push_back(
            capture.sequence.describe(i) + " keeps tensors that " + what + " (" + std::to_string(bytes) +
            " bytes): each replay overwrites them, and an eager run of the call makes new ones. "
            "If the program reads them, return them as outputs");
      }
    };
    note(own, "it makes");
    note(taken, "it takes from other calls");
  }
}

/// Throws: CaptureError if a body replaces a tensor that it reads by a new one.
void refuse_replaced(const SequenceCapture& capture, const std::vector<CaptureReads::Made>& kept) {
  for (const CaptureReads::Made& made : kept) {
    for (const auto& [keeper, in_sizing] : keepers_of(capture, made)) {
      for (const c10::Storage& external : capture.sequence.calls[keeper].reads.externals) {
        // If only graphs hold it, the module freed it while they were captured. The sizing pass's output may still be in a warm-up's
        // history.
        if (external.nbytes() == made.storage.nbytes() &&
            (external.unsafeGetStorageImpl() == in_sizing || !capture.holders.others_hold(external))) {
          throw CaptureError(
              capture.sequence.describe(keeper) + ": it reads a tensor of " + std::to_string(external.nbytes()) +
              " bytes that it keeps from call to call, and then keeps a new tensor instead; graphs would always read " +
              "the first tensor. Register the tensor as a buffer and change it in place (copy_, add_)");
        }
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
    const std::size_t keeper = keepers_of(capture, kept.front()).front().call;
    const std::vector<OutputStorage>& storages = capture.sequence.calls[kept.front().call].output_storages;
    const bool returned = std::any_of(storages.begin(), storages.end(),
                                      [&](const OutputStorage& storage) { return storage.is(kept.front().storage); });
    const char* const remedy = keeper != kept.front().call ? "Keep it outside of the call"
                               : returned
                                   ? "Let the member keep nothing, and keep the returned tensor outside of the call"
                                   : "Return the tensor as an output";
    throw CaptureError(
        capture.sequence.describe(keeper) + ": it keeps a tensor of " + std::to_string(kept.front().storage.nbytes()) +
        " bytes that it " + (keeper == kept.front().call ? "made" : "takes from another call") +
        ", but graphs of other captures write the same memory. " + remedy +
        ". Or capture in memory of its own: without GraphOptions::pool and CallOptions::share_memory, and with "
        "OnEvaluation::eager in CallOptions::on_evaluation");
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
  refuse_replaced(capture, kept);  // after all that: what the module keeps now has a value
  note_kept(capture, kept);
}

}  // namespace sidestream
