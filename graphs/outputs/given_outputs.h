#pragma once
#include <c10/util/ArrayRef.h>

#include "graphs/sequence/captured_call.h"

namespace sidestream {

/// Before a replay. Throws: UsageError where an input of which an output is a view lies otherwise than captured.
void check_views_of_inputs(const CapturedCall& call, c10::ArrayRef<at::Tensor> inputs);

/// The outputs of the replay of `call` that was just launched, as tensors of their own: with version counters of their own,
/// shared by those that share a storage. Autograd knows nothing of those in `StaticOutput::Kind::made` yet.
void give_outputs(CapturedCall& call, c10::ArrayRef<at::Tensor> inputs, c10::Stream current,
                  detail::TensorBuffer& outputs);

}  // namespace sidestream
