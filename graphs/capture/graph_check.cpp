#include "graphs/capture/graph_check.h"

#include <algorithm>
#include <cstddef>

#include "sidestream/error.h"

namespace sidestream {

const char* kind_in_words(GraphNode::Kind kind) {
  switch (kind) {
    case GraphNode::Kind::kernel:
      return "kernel";
    case GraphNode::Kind::copy_to_host:
      return "copy to the host";
    case GraphNode::Kind::copy_to_device:
      return "copy to the device";
    case GraphNode::Kind::copy:
      return "copy";
    case GraphNode::Kind::memset:
      return "memset";
    case GraphNode::Kind::event_record:
      return "record of an event";
    case GraphNode::Kind::event_wait:
      return "wait for an event";
    case GraphNode::Kind::empty:
      return "empty node";
    case GraphNode::Kind::host:
      return "host function";
    case GraphNode::Kind::child:
      return "child graph";
    case GraphNode::Kind::other:
      return "node";
  }
  return "node";
}

namespace {

/// True if [at, at + bytes) lies in [begin, begin + size).
bool contains(const void* begin, std::size_t size, const void* at, std::size_t bytes) {
  const auto* const from = static_cast<const std::byte*>(at);
  const auto* const start = static_cast<const std::byte*>(begin);
  return start != nullptr && from >= start && from + bytes <= start + size;
}

/// True if the storage's pinned memory holds all of these bytes.
bool is_leased_by(const SavedStorage& saved, const void* at, std::size_t bytes) {
  const auto holds_it = [&](const SharedSlots::Part& part) { return contains(part.data, part.bytes, at, bytes); };
  return (saved.lease && contains(saved.lease.data(), saved.lease.bytes(), at, bytes)) ||
         std::any_of(saved.parts.begin(), saved.parts.end(), holds_it);
}

bool is_leased(const void* at, std::size_t bytes, const CapturedCopies& copies) {
  const auto holds_it = [&](const auto& arena) { return arena->holds(at, bytes); };
  return std::any_of(copies.arenas.begin(), copies.arenas.end(), holds_it) ||
         std::any_of(copies.storages.begin(), copies.storages.end(),
                     [&](const auto& saved) { return is_leased_by(*saved, at, bytes); });
}

[[noreturn]] void refuse(const std::vector<GraphNode>& nodes, std::size_t index, const NodeNames& names,
                         const std::string& what, const char* why) {
  throw CaptureError(what + ": the captured graph holds a " + describe_node(nodes, index, names) + ", " + why);
}

std::size_t only_record(const std::vector<GraphNode>& nodes, const ExternalEvent& event, const std::string& what,
                        const char* name) {
  std::size_t found = nodes.size();
  std::size_t count = 0;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i].kind == GraphNode::Kind::event_record && nodes[i].event == event.native()) {
      found = i;
      ++count;
    }
  }
  if (count != 1) {
    throw CaptureError(what + ": its " + name + " event is recorded by " + std::to_string(count) +
                       " nodes of the captured graph; it must be exactly one, or other streams would wait for nothing");
  }
  return found;
}

std::vector<bool> ancestors(const std::vector<GraphNode>& nodes, std::size_t of) {
  std::vector<bool> reached(nodes.size(), false);
  std::vector<std::size_t> open{of};
  reached[of] = true;
  while (!open.empty()) {
    const std::size_t node = open.back();
    open.pop_back();
    for (const std::uint32_t before : nodes[node].predecessors) {
      if (!reached[before]) {
        reached[before] = true;
        open.push_back(before);
      }
    }
  }
  return reached;
}

bool works(GraphNode::Kind kind) {
  return kind != GraphNode::Kind::event_record && kind != GraphNode::Kind::event_wait && kind != GraphNode::Kind::empty;
}

}  // namespace

std::string describe_node(const std::vector<GraphNode>& nodes, std::size_t index, const NodeNames& names) {
  const GraphNode& node = nodes[index];
  std::string text = std::string(kind_in_words(node.kind)) + " (node " + std::to_string(index);
  if (node.bytes > 0) {
    text += ", " + std::to_string(node.bytes) + " bytes";
  }
  const NodeNames::Name name = names.of(index);
  if (!name.work.empty()) {
    text += ", of " + std::string(name.work);
  }
  if (!name.scope.empty()) {
    text += ", in \"" + std::string(name.scope) + "\"";
  }
  return text + ")";
}

void check_nodes(const std::vector<GraphNode>& nodes, const NodeNames& names, const CapturedCopies& copies,
                 const std::string& what) {
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const GraphNode& node = nodes[i];
    if (node.kind == GraphNode::Kind::host) {
      refuse(nodes, i, names, what,
             "which stops the stream at each replay until the host has run it; run it outside of the call");
    }
    using Memory = GraphNode::Memory;
    if (node.source_memory == Memory::pageable || node.destination_memory == Memory::pageable) {
      refuse(nodes, i, names, what,
             "whose host side is pageable memory: each replay would make the host wait, and would access that memory "
             "even after it was freed. Make the tensor on the device, or pass it as an argument of the call");
    }
    const bool leased = (node.source_memory != Memory::pinned || is_leased(node.source, node.bytes, copies)) &&
                        (node.destination_memory != Memory::pinned || is_leased(node.destination, node.bytes, copies));
    if (!leased) {
      refuse(nodes, i, names, what,
             "whose pinned memory the graph does not own: each replay would access that memory even after it was "
             "freed. Make the tensor on the device, or pass it as an argument of the call");
    }
  }
}

void check_copy_ends(const CapturedCopies& copies, Direction direction, const std::string& what) {
  std::size_t group = 0;
  for (std::size_t i = 0; i < copies.copies.size(); ++i) {
    while (group + 1 < copies.groups.size() && i >= copies.groups[group].end) {
      ++group;
    }
    const CapturedCopy& copy = copies.copies[i];
    if (direction != Direction::forward && copy.for_weights != (direction == Direction::weights)) {
      continue;
    }
    const SavedStorage& saved = *copies.storages[copy.storage];
    const bool leased = is_leased_by(saved, copy.host, copy.bytes);
    const void* const end = direction == Direction::forward ? copy.source : copy.target;
    const bool allocated = saved.device && contains(saved.device.data(), saved.device.nbytes(), end, copy.bytes);
    if (!leased || !allocated) {
      throw CaptureError(what + ": a copy of " + std::to_string(copy.bytes) + " bytes of group \"" +
                         copies.groups[group].site.text() + "\" has its " +
                         (!leased ? "host memory outside of a pinned slot that lives as long as the graph"
                                  : "device memory outside of the storage that it copies"));
    }
  }
}

void check_graph_events(const std::vector<GraphNode>& nodes, const NodeNames& names, const ExternalEvent& done,
                        const std::vector<const ExternalEvent*>& ready, const std::string& what) {
  const std::vector<bool> before_done = ancestors(nodes, only_record(nodes, done, what, "done"));
  for (const ExternalEvent* event : ready) {
    (void)only_record(nodes, *event, what, "ready");
  }
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (works(nodes[i].kind) && !before_done[i]) {
      throw CaptureError(what + ": its done event does not wait for all of its work; it misses a " +
                         describe_node(nodes, i, names) +
                         ". If a forward starts work on another stream, it must join that stream before it returns");
    }
  }
}

}  // namespace sidestream
