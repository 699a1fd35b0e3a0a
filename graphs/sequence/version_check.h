#pragma once
#include <c10/util/ArrayRef.h>

#include "graphs/sequence/captured_call.h"

namespace sidestream {

/// After a forward: notes the versions of what the backward graph reads at the caller's own addresses.
void stamp_versions(CapturedCall& call, c10::ArrayRef<at::Tensor> inputs, const detail::TensorBuffer& outputs);

/// Before its backward. In plain training autograd looks at the versions of what operators saved; a graph reads the same bytes.
/// Throws: UsageError that names what was changed in place and is needed.
void check_versions(const CapturedCall& call);

}  // namespace sidestream
