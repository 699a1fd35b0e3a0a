#pragma once
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

namespace sidestream {

/// In words, where `replayed` is not `eager`; none where each element is the same. Zeros of either sign are the same, and so are
/// two NaNs; an undefined tensor stands for zeros. Floating-point elements may be `tolerance` times the largest magnitude of
/// `eager` apart.
/// Ordering: reads on the current stream and blocks for the answer.  Capture: illegal.
[[nodiscard]] std::optional<std::string> difference(const at::Tensor& replayed, const at::Tensor& eager,
                                                    double tolerance);

}  // namespace sidestream
