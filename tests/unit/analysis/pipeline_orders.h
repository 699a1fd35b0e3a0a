#pragma once
#include <cstddef>
#include <cstdint>

#include "analysis/sequence_order.h"

namespace sidestream {

/// One rank of a 1F1B pipeline whose stage is `calls` calls, each a part of the next one's input: `warm_up` microbatches go forward
/// before the first backward.
[[nodiscard]] SequenceOrder one_forward_one_backward(std::size_t calls, std::size_t warm_up, std::size_t microbatches);
/// The first rank of an interleaved pipeline (sidestream/pipeline_order.h); a call is a virtual stage. `microbatches`: a multiple of
/// `ranks`.
[[nodiscard]] SequenceOrder interleaved(std::int64_t ranks, std::int64_t stages, std::int64_t microbatches);
/// All forwards, then the backwards of the microbatches in the order of their forwards.
[[nodiscard]] SequenceOrder forwards_first_in_order(std::size_t calls, std::size_t microbatches);

}  // namespace sidestream
