#pragma once
#include <vector>

#include <ATen/core/Tensor.h>

#include "graphs/outputs/saved_storages.h"
#include "graphs/sequence/captured_call.h"
#include "offload/exclusions.h"
#include "sidestream/detail/argument_parts.h"

namespace sidestream {

/// Sorts the outputs of the captured body of `call` by whose memory they are. `leaves`: its inputs. `saved`: the storages that autograd saved in it.
/// Throws: CaptureError for a view that a replay cannot make again of its own inputs.
void learn_outputs(CapturedCall& call, const std::vector<at::Tensor>& leaves, const detail::TensorBuffer& outputs,
                   const SavedStorages& saved, const Exclusions& exclusions);

}  // namespace sidestream
