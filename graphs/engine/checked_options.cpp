#include "graphs/engine/checked_options.h"

#include <cstdint>
#include <cstdlib>
#include <string>

#include "sidestream/error.h"

namespace sidestream {
namespace {

std::int64_t check_steps_by_environment() {
  const char* text = std::getenv("SIDESTREAM_CHECK_STEPS");
  if (text == nullptr || *text == 0) {
    return 0;
  }
  char* end = nullptr;
  const long long steps = std::strtoll(text, &end, 10);
  if (*end != 0 || steps < 0) {
    throw UsageError("SIDESTREAM_CHECK_STEPS is \"" + std::string(text) +
                     "\"; it must be a number of steps, 0 for none");
  }
  return steps;
}

}  // namespace

void check_graph_options(const GraphOptions& options, std::optional<c10::Stream> current) {
  if (options.side_streams() && *options.side_streams() < 1) {
    throw UsageError("side_streams is " + std::to_string(*options.side_streams()) +
                     "; it must be at least 1 (K, default 2)");
  }
  if (options.side_streams() && options.cuda_graph_stream()) {
    throw UsageError(
        "side_streams is given together with cuda_graph_stream, the one stream that all graphs replay on; give one of "
        "the two");
  }
  if (options.num_warmup_iters() < 0) {
    throw UsageError("num_warmup_iters is negative; it must be 0 or more");
  }
  if (options.cuda_graph_event() != nullptr && !options.cuda_graph_stream()) {
    throw UsageError("cuda_graph_event is given without cuda_graph_stream; give the stream that the graphs replay on");
  }
  if (options.cuda_graph_event() != nullptr && options.cuda_graph_stream() == current) {
    throw UsageError(
        "cuda_graph_stream is the current stream, so cuda_graph_event would order nothing; give another stream, or no "
        "event");
  }
}

Options checked_options(Options options) {
  check_graph_options(options.graph_options());
  if (options.call_options().max_captures() < 1) {
    throw UsageError("max_captures is " + std::to_string(options.call_options().max_captures()) +
                     "; it must be at least 1");
  }
  if (options.groups_in_flight() < 0) {
    throw UsageError("groups_in_flight is negative; it must be 0 or more");
  }
  if (options.check_steps() == 0) {
    options.check_steps(check_steps_by_environment());
  }
  if (options.check_steps() < 0) {
    throw UsageError("check_steps is negative; it must be 0 (off) or a number of steps");
  }
  return options;
}

}  // namespace sidestream
