#include "sidestream/pipeline_order.h"

#include <algorithm>
#include <cstddef>
#include <string>

#include "sidestream/error.h"

namespace sidestream {
namespace {

using Kind = PipelineStep::Kind;

constexpr std::int64_t kMostChunks = std::int64_t{1} << 20;

/// With a smaller remainder, or a group smaller than the ranks, ranks can wait for each other.
bool group_is_allowed(const PipelineShape& shape, std::int64_t group) {
  const std::int64_t rest = shape.microbatches % group;
  return group >= shape.ranks && (shape.microbatches <= group || rest == 0 || rest >= shape.ranks);
}

std::int64_t smallest_group(const PipelineShape& shape) {
  std::int64_t group = shape.ranks;
  while (!group_is_allowed(shape, group)) {
    ++group;
  }
  return group;
}

void require_number(std::int64_t number, const char* what) {
  if (number < 1 || number > kMostChunks) {
    throw UsageError("a pipeline has " + std::to_string(number) + " " + what + "; it must be 1 to " +
                     std::to_string(kMostChunks));
  }
}

/// How many microbatches in a row go through one virtual stage.
std::int64_t checked_group(const PipelineShape& shape) {
  require_number(shape.ranks, "ranks");
  require_number(shape.stages, "virtual stages on each rank");
  require_number(shape.microbatches, "microbatches");
  if (shape.ranks > kMostChunks / shape.stages / shape.microbatches) {
    throw UsageError("a pipeline of " + std::to_string(shape.ranks) + " ranks with " + std::to_string(shape.stages) +
                     " virtual stages each and " + std::to_string(shape.microbatches) +
                     " microbatches has too many chunks; at most " + std::to_string(kMostChunks) + " are possible");
  }
  if (shape.stages == 1 || shape.group == 0) {
    return smallest_group(shape);
  }
  if (!group_is_allowed(shape, shape.group)) {
    throw UsageError("an interleaved order of " + std::to_string(shape.microbatches) + " microbatches on " +
                     std::to_string(shape.ranks) + " ranks is not defined for groups of " +
                     std::to_string(shape.group) +
                     ": a group, and what remains after the last whole group, must be at least as many microbatches as "
                     "there are ranks; use groups of " +
                     std::to_string(smallest_group(shape)));
  }
  return std::min(shape.group, std::max(shape.ranks, shape.microbatches));
}

/// How many forwards a rank runs before its first backward, not counting the one just before it, if there are enough.
std::int64_t forwards_first(const PipelineShape& shape, std::int64_t group, std::int64_t rank) {
  const std::int64_t ranks_after = shape.ranks - 1 - rank;
  return shape.stages == 1 ? ranks_after : 2 * ranks_after + (shape.stages - 1) * group;
}

/// The chunks of a rank in the order of their forwards.
std::vector<PipelineStep> forwards(const PipelineShape& shape, std::int64_t group) {
  std::vector<PipelineStep> result;
  for (std::int64_t first = 0; first < shape.microbatches; first += group) {
    for (std::int64_t stage = 0; stage < shape.stages; ++stage) {
      for (std::int64_t i = first; i < std::min(first + group, shape.microbatches); ++i) {
        result.push_back({stage, i, Kind::forward});
      }
    }
  }
  return result;
}

}  // namespace

std::vector<PipelineStep> pipeline_order(const PipelineShape& shape, std::int64_t rank) {
  const std::int64_t group = checked_group(shape);
  if (rank < 0 || rank >= shape.ranks) {
    throw UsageError("rank " + std::to_string(rank) + " is not one of the pipeline's ranks, 0 to " +
                     std::to_string(shape.ranks - 1));
  }
  const std::vector<PipelineStep> chunks = forwards(shape, group);
  const std::size_t first = static_cast<std::size_t>(forwards_first(shape, group, rank));
  const std::size_t delay = static_cast<std::size_t>(forwards_first(shape, group, 0)) - first;
  const std::size_t warm_up = std::min(chunks.size(), first);
  std::vector<PipelineStep> order;
  std::vector<PipelineStep> backwards;
  std::size_t done = 0;  // of the backwards' weight gradients
  const auto compute_weight_gradients = [&] {
    order.push_back(backwards[done++]);
    order.back().kind = Kind::weight_gradients;
  };
  for (std::size_t i = 0; i < chunks.size() + warm_up; ++i) {
    if (i < chunks.size()) {
      order.push_back(chunks[i]);
    }
    if (i < warm_up) {
      continue;
    }
    const PipelineStep& forward = chunks[i - warm_up];
    backwards.push_back({shape.stages - 1 - forward.stage, forward.microbatch, Kind::backward});
    order.push_back(backwards.back());
    // After the last forward, a rank has time for weight gradients while it waits for the next backward.
    if (shape.delay_weight_gradients && (backwards.size() - done > delay || i >= chunks.size())) {
      compute_weight_gradients();
    }
  }
  while (shape.delay_weight_gradients && done < backwards.size()) {
    compute_weight_gradients();
  }
  return order;
}

}  // namespace sidestream
