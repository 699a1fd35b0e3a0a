#pragma once
#include <optional>

#include <c10/core/Stream.h>

#include "sidestream/options.h"

namespace sidestream {

/// `options` as an engine uses them: what the environment sets is filled in.
/// Throws: UsageError for values that make no sense.
[[nodiscard]] Options checked_options(Options options);

/// `current`: the caller's stream, if a capture begins. Throws: UsageError for values that make no sense (see GraphOptions).
void check_graph_options(const GraphOptions& options, std::optional<c10::Stream> current = std::nullopt);

/// Whether all ranks capture now: the answer of GraphOptions::agree_to_capture, true if it is not set. `mine`: this rank has something to
/// capture. Throws: what agree_to_capture throws.
[[nodiscard]] inline bool agree_to_capture(const GraphOptions& options, bool mine = true) {
  return options.agree_to_capture() == nullptr || options.agree_to_capture()(mine);
}

}  // namespace sidestream
