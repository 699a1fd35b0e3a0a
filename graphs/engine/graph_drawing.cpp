#include "graphs/engine/graph_drawing.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <unordered_map>
#include <vector>

#include <sys/stat.h>
#include <unistd.h>

#include "graphs/calls/engine_sequences.h"
#include "graphs/capture/graph_check.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

std::string in_quotes(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '\n') {
      out += "\\n";
      continue;
    }
    if (c == '"' || c == '\\') {
      out += '\\';
    }
    out += c;
  }
  return out + "\"";
}

std::string in_bytes(std::size_t bytes) { return std::to_string(bytes) + " bytes"; }

/// Everything that a drawing shows of a graph, except its nodes.
struct DrawnGraph {
  const CapturedCall& call;
  const CapturedCall::OneGraph& graph;
  const char* which = "";       ///< "forward", "backward" or "weights"
  bool copies_to_host = false;  ///< beside it
  bool copies_to_device = false;
  std::string stream;  ///< in words: which one launches it
};

/// One captured graph in Graphviz's language `dot`: its nodes, named by operator and scope, its events, the copies that
/// replays queue beside it, and the bytes of what it reads and writes.
class Drawing {
 public:
  Drawing(const Runtime& runtime, const DrawnGraph& drawn)
      : drawn_(drawn),
        nodes_(runtime.nodes(drawn.graph.graph)),
        names_(drawn.graph.names),
        groups_(drawn.call.copies.captured.groups) {
    events_.emplace(drawn.graph.done.native(), "done");
    for (const CapturedCopies::Group& group : groups_) {
      for (const ExternalEvent& event : group.ready) {
        events_.emplace(event.native(), "ready, group " + group.site.text());
      }
    }
  }

  std::string draw() {
    const std::string title = "graphed call " + drawn_.call.spec.name + ", " + drawn_.which;
    text_ = "digraph " + in_quotes(title) +
            " {\n  label=" + in_quotes(title + "\n" + drawn_.stream + "; " + std::to_string(nodes_.size()) + " nodes") +
            ";\n  node [shape=box];\n";
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      text_ += "  n" + std::to_string(i) + " [label=" + in_quotes(words(i)) + "];\n";
      for (const std::uint32_t before : nodes_[i].predecessors) {
        draw_edge("n", before, "n", i, "");
      }
    }
    if (drawn_.copies_to_host || drawn_.copies_to_device) {
      draw_copies();
    }
    return text_ + "}\n";
  }

 private:
  [[nodiscard]] std::string words(std::size_t index) const {
    const GraphNode& node = nodes_[index];
    const NodeNames::Name name = names_.of(index);
    const auto known_as = [&](const char* kind) {
      std::string text = name.work.empty() ? std::string(node.name.empty() ? kind : node.name) : std::string(name.work);
      if (!node.name.empty() && !name.work.empty() && name.work.find(node.name) == std::string_view::npos) {
        text += "\n" + node.name.substr(0, 60);
      }
      return text + (node.bytes == 0 ? "" : "\n" + in_bytes(node.bytes)) +
             (name.scope.empty() ? "" : "\n" + std::string(name.scope));
    };
    const auto event = events_.find(node.event);
    const std::string event_name = event == events_.end() ? "an event of the caller's" : event->second;
    switch (node.kind) {
      case GraphNode::Kind::event_record:
        return "record " + event_name;
      case GraphNode::Kind::event_wait:
        return "wait for " + event_name;
      case GraphNode::Kind::empty:
        return "join";
      case GraphNode::Kind::kernel:
      case GraphNode::Kind::copy_to_host:
      case GraphNode::Kind::copy_to_device:
      case GraphNode::Kind::copy:
      case GraphNode::Kind::memset:
      case GraphNode::Kind::host:
      case GraphNode::Kind::child:
      case GraphNode::Kind::other:
        return known_as(kind_in_words(node.kind));
    }
    return {};
  }

  void draw_edge(const char* from, std::size_t i, const char* to, std::size_t j, const char* attributes) {
    text_ += std::string("  ") + from + std::to_string(i) + " -> " + to + std::to_string(j) + attributes + ";\n";
  }

  /// Copies are queued beside the graph: one node for each group, in the order of the copy stream.
  void draw_copies() {
    std::size_t begin = 0;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
      std::size_t bytes = 0;
      const std::size_t count = groups_[g].end - begin;
      for (; begin < groups_[g].end; ++begin) {
        bytes += drawn_.call.copies.captured.copies[begin].bytes;
      }
      text_ +=
          "  c" + std::to_string(g) + " [label=" +
          in_quotes(std::string("beside the graph: ") + (drawn_.copies_to_device ? "to the device" : "to the host") +
                    ", group " + groups_[g].site.text() + "\n" + std::to_string(count) +
                    (count == 1 ? " copy, " : " copies, ") + in_bytes(bytes)) +
          "];\n";
      if (g > 0) {
        draw_edge("c", g - 1, "c", g, "");
      }
      for (std::size_t i = 0; i < nodes_.size(); ++i) {
        if (drawn_.copies_to_device && g + 1 == groups_.size() && nodes_[i].predecessors.empty()) {
          draw_edge("c", g, "n", i, " [style=dashed, label=reloaded]");
        } else if (drawn_.copies_to_host && nodes_[i].kind == GraphNode::Kind::event_record && is_ready(g, nodes_[i])) {
          draw_edge("n", i, "c", g, " [style=dashed, label=ready]");
        }
      }
    }
  }

  [[nodiscard]] bool is_ready(std::size_t group, const GraphNode& record) const {
    return std::any_of(groups_[group].ready.begin(), groups_[group].ready.end(),
                       [&](const ExternalEvent& event) { return record.event == event.native(); });
  }

  const DrawnGraph& drawn_;
  std::vector<GraphNode> nodes_;
  const NodeNames& names_;
  const std::vector<CapturedCopies::Group>& groups_;
  std::unordered_map<const void*, std::string> events_;
  std::string text_;
};

// Not std::filesystem: LibTorch exports its own copy of it.
void make_folder(const std::string& folder) {
  for (std::size_t end = folder.find('/', 1);; end = folder.find('/', end + 1)) {
    const std::string path = folder.substr(0, end);
    if (mkdir(path.c_str(), 0777) != 0 && errno != EEXIST) {
      throw UsageError("the folder \"" + path + "\" for drawings of graphs cannot be made: " + std::strerror(errno));
    }
    if (end == std::string::npos) {
      break;
    }
  }
  if (access((folder + "/.").c_str(), W_OK) != 0) {
    throw UsageError("the folder \"" + folder +
                     "\" for drawings of graphs cannot be written to: " + std::strerror(errno));
  }
}

std::string file_name(std::size_t sequence, std::size_t index, const std::string& call, const char* which) {
  constexpr std::size_t kLongest = 100;
  std::string name = std::to_string(sequence) + "_" + std::to_string(index) + "_" + call.substr(0, kLongest);
  for (char& c : name) {
    const bool plain = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' || c == '-' || c == '_';
    c = plain ? c : '_';
  }
  return name + "_" + which + ".dot";
}

/// The file is there whole, or as it was.
void write_text(const std::string& path, const std::string& text) {
  const std::string partial = path + "." + std::to_string(getpid()) + ".partial";  // another process may write it too
  std::ofstream file(partial, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (!file || std::rename(partial.c_str(), path.c_str()) != 0) {
    const int why = errno;
    unlink(partial.c_str());
    throw UsageError("the drawing of a graph cannot be written to \"" + path + "\": " + std::strerror(why));
  }
}

}  // namespace

std::vector<std::string> write_graph_files(const Runtime& runtime, const EngineSequences& sequences,
                                           const std::string& folder) {
  if (folder.empty()) {
    throw UsageError("OffloadEngine::write_graphs needs the name of a folder");
  }
  make_folder(folder);
  std::vector<std::string> files;
  std::size_t number = 0;
  sequences.for_each([&](const GraphSequence& sequence) {
    for (std::size_t index = 0; index < sequence.captured().calls.size(); ++index) {
      const CapturedCall& call = sequence.captured().calls[index];
      const std::string side = sequence.streams().in_words(0);
      for (const DrawnGraph& drawn :
           {DrawnGraph{call, call.forward, "forward", true, false, sequence.streams().in_words(index)},
            DrawnGraph{call, call.backward, "backward", false, true, side},
            DrawnGraph{call, call.weights, "weights", false, false, side}}) {
        if (drawn.graph.graph) {
          files.push_back(folder + "/" + file_name(number, index, call.spec.name, drawn.which));
          write_text(files.back(), Drawing(runtime, drawn).draw());
        }
      }
    }
    ++number;
  });
  return files;
}

}  // namespace sidestream
