#pragma once
#include <cstdint>
#include <ostream>
#include <string>

#include "sidestream/options.h"

namespace sidestream::testing_model {

/// How a BlockModel's step is wrapped: which blocks are graphed, what leaves the device, and the form of the graphs.
struct Wrapping {
  std::string name;
  std::string graph;
  std::string offload;
  std::int64_t side_streams = 2;
  bool accumulate = false;

  [[nodiscard]] Options options(c10::Device device, std::size_t min_bytes) const {
    Options result(device);
    result.min_bytes(min_bytes).offload(offload).graph_options(
        GraphOptions().side_streams(side_streams).accumulate_in_graph(accumulate));
    if (!graph.empty()) {
      result.graph(graph);
    }
    return result;
  }
};

inline void PrintTo(const Wrapping& value, std::ostream* out) { *out << value.name; }

}  // namespace sidestream::testing_model
