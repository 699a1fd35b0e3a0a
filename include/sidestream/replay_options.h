#pragma once
#include <memory>
#include <optional>

#include <c10/core/Stream.h>
#include <torch/arg.h>

namespace sidestream {

class GraphEvent;

/// Where one call of a GraphedCallable replays, and its backward with it.
/// Throws (the call): UsageError for a stream or an event of another device; nothing is queued then.
/// Source: TransformerEngine's cuda_graph_stream and cuda_graph_event, as arguments of a call.
struct ReplayOptions {
  /// Forward and backward replay on this stream, in place of the side streams or the stream of GraphOptions. It may be the
  /// current one. It must live as long as the callable [cuda_graph_stream].
  TORCH_ARG(std::optional<c10::Stream>, stream);
  /// Recorded behind the forward's graph, and later behind the backward's, on the stream that each replays on: the one above, or
  /// where none is given the callable's own. Who waits for it waits for that compute and for no copy [cuda_graph_event].
  /// Where the call runs eagerly, on the current stream, the event is recorded behind its forward there, and its backward records
  /// nothing.
  TORCH_ARG(std::shared_ptr<GraphEvent>, event);
};

}  // namespace sidestream
