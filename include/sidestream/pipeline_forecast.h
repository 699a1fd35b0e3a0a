#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "sidestream/detail/export.h"
#include "sidestream/pipeline_order.h"

namespace sidestream {

/// What a chunk's layers, and the copies of what they save, cost. All layers are alike. A layer is one graphed call (`ss::call`).
struct PipelineCosts {
  std::int64_t layers = 1;             ///< of a chunk
  double forward_seconds = 0;          ///< of a layer
  double backward_seconds = 0;         ///< of a layer
  double weights_seconds = 0;          ///< of a layer's backward: for weight gradients, if these are delayed
  double send_seconds = 0;             ///< until a chunk's output or gradient is at the next virtual stage
  std::int64_t saved_bytes = 0;        ///< what a layer saves for its backward
  std::int64_t offloadable_bytes = 0;  ///< the part of `saved_bytes` that Options::offload names; 0: no offload
  std::int64_t for_weights_bytes =
      0;  ///< kept by a layer from its backward until its weight gradients, if these are delayed
  std::int64_t chunk_bytes =
      0;  ///< kept by a chunk until its backward's end, beside its layers: its input and its output
  std::int64_t forward_more_bytes = 0;    ///< what a layer's forward takes at its peak beyond the bytes above
  std::int64_t backward_more_bytes = 0;   ///< what a layer's backward takes at its peak beyond the bytes above
  double to_host = 0;                     ///< bytes a second; needed if something is offloadable
  double to_device = 0;                   ///< likewise
  std::optional<std::int64_t> lag;        ///< bytes, as Options::lag; not set: as the engine chooses on a GPU
  std::optional<std::int64_t> lookahead;  ///< likewise, as Options::lookahead
};

/// A step of a rank's order. Times are in seconds from the begin of the pipeline's step.
struct ForecastStep {
  PipelineStep step;  ///< the step
  double begin = 0;   ///< when the rank is free and the step's input is there
  double end = 0;     ///< when its last layer ends
  double waited = 0;  ///< the part of the time from `begin` to `end` in which its layers waited for copies
};

/// A copy of what one layer of a chunk saved.
struct ForecastCopy {
  std::int64_t stage = 0;       ///< virtual stage of the chunk
  std::int64_t microbatch = 0;  ///< microbatch of the chunk
  std::int64_t layer = 0;       ///< of the chunk, from 0
  double begin = 0;             ///< seconds
  double end = 0;               ///< seconds
};

/// Live memory above weights, from a time on.
struct ForecastMemory {
  double time = 0;         ///< seconds
  std::int64_t bytes = 0;  ///< from then on
};

/// What a step will take on one rank.
struct RankForecast {
  double seconds = 0;                           ///< the pipeline's step; the sum of the next three
  double busy_seconds = 0;                      ///< the rank computes
  double idle_seconds = 0;                      ///< it waits for other ranks, or for the end of the pipeline's step
  double waited_seconds = 0;                    ///< its layers wait for copies
  std::int64_t peak_bytes = 0;                  ///< of live memory above weights
  std::int64_t peak_bytes_without_offload = 0;  ///< the same if nothing is offloaded
  std::int64_t offloaded_bytes = 0;             ///< in the step
  std::vector<ForecastStep> steps;              ///< its order
  std::vector<ForecastCopy> to_host;            ///< one after the other
  std::vector<ForecastCopy> to_device;          ///< likewise
  std::vector<ForecastMemory> live;             ///< live memory over time, with offload
};

/// What a step will take on each rank of a pipeline, if every rank runs its pipeline_order as early as it can.
///
/// The engine's own rules say which layers are offloaded, and when their memory is released and allocated again. Layers wait for
/// copies as replays do. Ranks wait for each other as in pipeline_times. The device computes at one speed, beside copies too. Sending
/// takes time, but neither compute nor the link to the host. If weight gradients are delayed, all that is offloaded is reloaded for the
/// backward.
/// Threads: any.
/// Throws: UsageError as pipeline_order. Also for costs that are negative, too large or no number, for a chunk without layers, for weight
/// gradients that take longer than a backward, for a link without a rate, if more is offloadable than saved, and for more than 65,536
/// layers of chunks. The message gives the number and the remedy.
[[nodiscard]] SIDESTREAM_API std::vector<RankForecast> forecast_pipeline(const PipelineShape& shape,
                                                                         const PipelineCosts& costs);

/// Forecasts one rank that runs alone, as a rank does that you measure on one device: its inputs are always there.
/// Threads: any.  Throws: UsageError as forecast_pipeline.
[[nodiscard]] SIDESTREAM_API RankForecast forecast_rank(const PipelineShape& shape, const PipelineCosts& costs,
                                                        std::int64_t rank);

}  // namespace sidestream
