#pragma once
#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "sidestream/options.h"

namespace sidestream::testing_model {

/// How a BlockModel's step is wrapped: which blocks are graphed, what leaves the device, and the form of the graphs.
struct Wrapping {
  std::string name;
  std::string graph;
  std::string offload;
  std::int64_t side_streams = 2;
  bool accumulate = false;
  std::string delay = {};  ///< what of `offload` leaves behind the next graph

  [[nodiscard]] Options options(c10::Device device, std::size_t min_bytes) const {
    Options result(device);
    result.min_bytes(min_bytes).offload(offload).graph_options(
        GraphOptions()
            .side_streams(side_streams)
            .gradients("**", accumulate ? GradientPolicy::accumulated : GradientPolicy::cloned));
    if (!graph.empty()) {
      result.graph(graph);
    }
    if (!delay.empty()) {
      result.delay(delay);
    }
    return result;
  }
};

/// Eager, graphed on one to four side streams, graphs that own the gradients, and both kinds of layers in one model.
[[nodiscard]] inline std::vector<Wrapping> wrappings() {
  return {{"eager", "", "blocks.*.*"},
          {"eager_some", "", "blocks.*.core_attn,blocks.*.proj"},
          {"graphs_1", "blocks.*", "blocks.*.*", 1},
          {"graphs_2", "blocks.*", "blocks.*.*", 2},
          {"graphs_3", "blocks.*", "blocks.*.*", 3},
          {"graphs_4", "blocks.*", "blocks.*.*", 4},
          {"graphs_accumulating", "blocks.*", "blocks.*.fc1,blocks.*.core_attn,blocks.*.proj", 2, true},
          {"mixed_1", "blocks.0,blocks.3", "**", 1},
          {"mixed_2", "blocks.1,blocks.2,blocks.4", "**", 2},
          {"mixed_delayed", "blocks.1,blocks.3", "blocks.*.*", 2, false, "blocks.*.*"}};
}

inline void PrintTo(const Wrapping& value, std::ostream* out) { *out << value.name; }

}  // namespace sidestream::testing_model
