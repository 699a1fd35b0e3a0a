#include "graphs/calls/recorded_outputs.h"

#include <c10/util/irange.h>

#include "graphs/resources/eager_plan.h"
#include "offload/saved_tensor_recorder.h"

namespace sidestream {

RecordedOutputs::Holder RecordedOutputs::holder_of(const Output& output, const SavedTensorRecorder* recorder) {
  const c10::StorageImpl* const storage = output.storage._unsafe_get_target();
  const auto saved = recorder != nullptr ? recorder->saved(storage) : nullptr;
  const bool saved_here = saved != nullptr && saved->device && saved->device.unsafeGetStorageImpl() == storage;
  if (others_hold(output.storage, saved_here ? 1 : 0)) {
    return Holder::others;
  }
  if (saved == nullptr) {
    return Holder::none;
  }
  // A group that has not ended, or stays, holds it in a replay too.
  return saved->place == SavedStorage::Place::device ? Holder::others : Holder::groups;
}

void RecordedOutputs::call_begins(std::size_t call, std::size_t sequence, const SavedTensorRecorder* recorder) {
  for (Output& output : outputs_) {
    if (output.sequence == sequence && output.holder == Holder::unknown) {
      // A call that comes before it in the sequence begins another pass: after the last one there are only backwards.
      output.holder = call > output.call ? holder_of(output, recorder) : Holder::others;
    }
  }
}

void RecordedOutputs::add(std::size_t call, std::size_t sequence, c10::ArrayRef<at::Tensor> outputs) {
  for (const auto i : c10::irange(outputs.size())) {
    if (outputs[i].defined() && outputs[i].has_storage()) {
      outputs_.push_back({call, sequence, i, outputs[i].storage().getWeakStorageImpl()});
    }
  }
}

std::vector<bool> RecordedOutputs::released(std::size_t call, const EagerPlan& plan) const {
  std::vector<bool> result;
  for (const Output& output : outputs_) {
    if (output.call != call) {
      continue;
    }
    const bool is_free =
        output.holder == Holder::none ||
        (output.holder == Holder::groups && plan.offloads_all_savers_of(output.storage._unsafe_get_target()));
    if (output.index >= result.size()) {  // the first run
      result.resize(output.index + 1, false);
      result[output.index] = is_free;
    }
    result[output.index] = result[output.index] && is_free;
  }
  return result;
}

}  // namespace sidestream
