#pragma once
#include <c10/util/ArrayRef.h>

#include "graphs/sequence/captured_call.h"

namespace sidestream {

/// After a forward: notes the versions of the tensors that the backward graph reads at the caller's own addresses.
void stamp_versions(CapturedCall& call, c10::ArrayRef<at::Tensor> inputs, const detail::TensorBuffer& outputs);

/// Before the backward. In plain training autograd compares the versions of saved tensors; a graph reads the same bytes.
/// Throws: UsageError that names a tensor that was changed in place and that the backward needs.
void check_versions(const CapturedCall& call);

}  // namespace sidestream
