#include "sim/device/graph.h"

#include <algorithm>

#include <sidestream/error.h>

#include "sim/device/state.h"

namespace sidestream::sim {
namespace {

GraphNode::Kind listed_kind(Work::Kind kind) {
  switch (kind) {
    case Work::Kind::compute:
      return GraphNode::Kind::kernel;
    case Work::Kind::copy_to_host:
      return GraphNode::Kind::copy_to_host;
    case Work::Kind::copy_to_device:
      return GraphNode::Kind::copy_to_device;
    case Work::Kind::poison:
      return GraphNode::Kind::memset;
    case Work::Kind::event_record:
      return GraphNode::Kind::event_record;
    case Work::Kind::event_wait:
      return GraphNode::Kind::event_wait;
  }
  return GraphNode::Kind::other;
}

void describe_ends(const Work& work, GraphNode& node) {
  if (work.kind != Work::Kind::copy_to_host && work.kind != Work::Kind::copy_to_device) {
    return;
  }
  const bool out = work.kind == Work::Kind::copy_to_host;
  for (const Access& access : work.accesses) {
    (access.write ? node.destination : node.source) = access.begin;
    node.bytes = access.bytes;
  }
  node.source_memory = out ? GraphNode::Memory::device : GraphNode::Memory::pinned;
  node.destination_memory = out ? GraphNode::Memory::pinned : GraphNode::Memory::device;
}

NodeSet find_sinks(const std::vector<CapturedWork>& nodes) {
  std::vector<bool> followed(nodes.size(), false);
  for (const CapturedWork& node : nodes) {
    for (const std::uint32_t before : node.after) {
      followed[before] = true;
    }
  }
  NodeSet sinks;
  for (std::size_t node = 0; node < nodes.size(); ++node) {
    if (!followed[node]) {
      sinks.push_back(static_cast<std::uint32_t>(node));
    }
  }
  return sinks;
}

std::size_t bytes_of(const std::vector<CapturedWork>& nodes) {
  const auto listed = [](const CapturedWork& node) { return node.work->kind != Work::Kind::poison; };
  return graph_node_bytes * static_cast<std::size_t>(std::count_if(nodes.begin(), nodes.end(), listed));
}

// Forks of a graph get queues of their own for each launching stream.
constexpr c10::StreamId queues_per_stream = c10::StreamId{1} << 32;

const std::shared_ptr<const Work>& graph_end() {
  static const auto work = [] {
    Work end;
    end.kind = Work::Kind::event_wait;
    end.name = "graph end";
    return std::make_shared<const Work>(std::move(end));
  }();
  return work;
}

// Moves the work's generator on by what the work drew. Returns the state at which its draws began.
GeneratorState run_and_draw(const Work& work) {
  const GeneratorState first = state_of(work.generator);
  GeneratorState draws = first;
  {
    const ReplayState replay(draws);
    work.run();
  }
  set_state_of(work.generator, draws);
  return first;
}

// Nothing is held back: the nodes run at once, in capture order, which is a legal order.
void run_at_once(const GraphBody& graph) {
  for (const CapturedWork& node : graph.nodes) {
    switch (node.work->kind) {
      case Work::Kind::event_record:
        ++node.event->version;
        node.event->mark = no_work;
        node.event->done_at = std::chrono::steady_clock::now();
        break;
      case Work::Kind::compute:
        if (node.work->draws()) {
          (void)run_and_draw(*node.work);
          break;
        }
        node.work->run();
        break;
      case Work::Kind::copy_to_host:
      case Work::Kind::copy_to_device:
        node.work->run();
        break;
      case Work::Kind::poison:
      case Work::Kind::event_wait:
        break;
    }
  }
}

}  // namespace

GraphBody::GraphBody(Device& owner, const Capture& capture, std::vector<CapturedWork> nodes_)
    : device(owner),
      pool(capture.pool),
      nodes(std::move(nodes_)),
      origin(capture.origin),
      sinks(find_sinks(nodes)),
      draws(std::any_of(nodes.begin(), nodes.end(), [](const CapturedWork& node) { return node.work->draws(); })),
      bytes(bytes_of(nodes)) {
  device.take_outside(bytes, "a graph");
  device.retain_pool(&pool);
}

GraphBody::~GraphBody() {
  device.release_pool(&pool);
  device.give_back_outside(bytes);
}

std::vector<GraphNode> GraphBody::list() const {
  std::vector<GraphNode> listed;
  std::vector<NodeSet> stands_for(nodes.size());  // what a node, or a poison's predecessors, are in the list
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    NodeSet before;
    for (const std::uint32_t node : nodes[i].after) {
      merge(before, stands_for[node]);
    }
    if (nodes[i].work->kind == Work::Kind::poison) {
      stands_for[i] = before;
      continue;
    }
    stands_for[i].assign(1, static_cast<std::uint32_t>(listed.size()));
    GraphNode node;
    node.kind = listed_kind(nodes[i].work->kind);
    node.event = nodes[i].event.get();
    node.predecessors.assign(before.begin(), before.end());
    if (nodes[i].work->kind == Work::Kind::compute) {
      node.name = nodes[i].work->name;
    }
    describe_ends(*nodes[i].work, node);
    listed.push_back(std::move(node));
  }
  return listed;
}

void Device::launch(const std::shared_ptr<GraphBody>& graph, c10::StreamId id) {
  const auto drawing = graph->draws ? std::unique_lock(draws_lock()) : std::unique_lock<std::mutex>();
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  StreamState& stream = state_->stream(id);
  if (stream.capture != nullptr) {
    state_->invalidate(*stream.capture, "launch of a graph on a capturing stream; launch it after end_capture");
  }
  state_->refuse_in_capture("launch of a graph");
  graph->pool.captured.clear();
  Timeline& timeline = state_->timeline;
  if (timeline.order().immediate() && !timeline.keeping() && !timeline.pending()) {
    run_at_once(*graph);
    return;
  }
  // Roots run after what the stream has and waits for; its next work after all sinks.
  Queued roots;
  state_->order_after(stream, roots.after);
  std::vector<WorkId> ids;
  ids.reserve(graph->nodes.size());
  for (const CapturedWork& node : graph->nodes) {
    Queued queued;
    queued.work = node.work;
    queued.queue = node.work->stream == graph->origin ? id : (id + 1) * queues_per_stream + node.work->stream;
    if (node.after.empty()) {
      queued.after = roots.after;
    }
    for (const std::uint32_t before : node.after) {
      queued.after.push_back(ids[before]);
    }
    if (node.work->draws_vary) {  // runs now: the next node that draws must know how much this one drew
      for (const WorkId before : queued.after) {
        timeline.force(before);
      }
      queued.random = std::make_shared<const GeneratorState>(run_and_draw(*node.work));
      queued.done = true;
    } else if (node.work->draws()) {
      queued.random = std::make_shared<const GeneratorState>(take_draws(node.work->generator, node.work->random_draws));
    }
    if (node.work->kind == Work::Kind::event_wait && timeline.matters(node.event->mark)) {
      queued.after.push_back(node.event->mark);
    }
    if (state_->copy_issued &&
        (node.work->kind == Work::Kind::copy_to_host || node.work->kind == Work::Kind::copy_to_device)) {
      state_->copy_issued(*node.work);
    }
    const bool records = node.work->kind == Work::Kind::event_record;
    if (records) {
      queued.event = node.event;
      ++node.event->version;
      node.event->mark = timeline.next_id();
    }
    ids.push_back(timeline.append(std::move(queued)));
  }
  Queued end;
  end.work = graph_end();
  end.queue = id;
  end.after = roots.after;
  for (const std::uint32_t sink : graph->sinks) {
    end.after.push_back(ids[sink]);
  }
  stream.last = timeline.append(std::move(end));
}

}  // namespace sidestream::sim
