#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace sidestream {

/// One node of a captured graph; `predecessors` are indices into the list that contains it. The nodes of a child graph are in the same
/// list, after those of the graph that holds it. They run after the predecessors of the child's node, and that node runs after them.
struct GraphNode {
  enum class Kind : std::uint8_t {
    kernel,
    copy_to_host,
    copy_to_device,
    copy,
    memset,
    event_record,
    event_wait,
    empty,
    host,   ///< a function that runs on the host
    child,  ///< a graph
    other
  };
  /// What lies at one end of a copy.
  enum class Memory : std::uint8_t {
    unknown,
    device,
    pinned,    ///< page-locked memory of the host
    pageable,  ///< other memory of the host
  };
  Kind kind = Kind::other;
  const void* event = nullptr;  ///< native event of a record or wait node, else null
  std::vector<std::uint32_t> predecessors;
  std::string name;  ///< of a kernel, as the device knows it; empty if it does not say
  // Of a copy; of a memset the destination.
  const void* source = nullptr;
  const void* destination = nullptr;
  std::size_t bytes = 0;
  Memory source_memory = Memory::unknown;
  Memory destination_memory = Memory::unknown;
};

}  // namespace sidestream
