#pragma once
#include <memory>
#include <optional>

#include <c10/core/Stream.h>
#include <torch/arg.h>

namespace sidestream {

class GraphEvent;

/// On which stream one call of a GraphedCallable and its backward replay, and which event they record.
///
/// Each option is a chained setter; without an argument it gives the value.
/// Throws (the call): UsageError for a stream or an event of another device. Nothing is queued then.
/// Source: TransformerEngine's cuda_graph_stream and cuda_graph_event, as arguments of a call.
struct ReplayOptions {
  /// Forward and backward replay on this stream, in place of the side streams or the stream of GraphOptions [cuda_graph_stream].
  /// It may be the current stream. It must live as long as the callable.
  TORCH_ARG(std::optional<c10::Stream>, stream);
  /// Recorded after the forward's graph, and later after the backward's graph, on the stream on which each replays
  /// [cuda_graph_event]. Work that waits for the event waits for that compute and for no copy.
  /// If the call runs eagerly, the event is recorded on the current stream after the forward, and the backward does not record it.
  TORCH_ARG(std::shared_ptr<GraphEvent>, event);
};

}  // namespace sidestream
