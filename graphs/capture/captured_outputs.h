#pragma once
#include <vector>

#include "graphs/capture/saved_storages.h"
#include "graphs/sequence/captured_call.h"
#include "offload/exclusions.h"

namespace sidestream {

/// What the captured body of `call` gave, sorted by whose memory it is. `leaves` are what it was given, `saved` what autograd
/// saved meanwhile. Throws: CaptureError for views that cannot be made again of what a replay is given.
void learn_outputs(CapturedCall& call, const std::vector<at::Tensor>& leaves, const detail::TensorBuffer& outputs,
                   const SavedStorages& saved, const Exclusions& exclusions);

}  // namespace sidestream
