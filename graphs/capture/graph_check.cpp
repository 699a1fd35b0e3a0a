#include "graphs/capture/graph_check.h"

#include "graphs/capture/node_check.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

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
