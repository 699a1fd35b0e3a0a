#include "graphs/engine/graph_drawing.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <unordered_map>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "graphs/calls/engine_sequences.h"
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

/// "1.5 MiB".
std::string size_in_words(std::size_t bytes) {
  static constexpr std::array<const char*, 4> kUnits{"bytes", "KiB", "MiB", "GiB"};
  std::size_t unit = 0;
  std::size_t tenths = bytes * 10;
  for (; unit + 1 < kUnits.size() && tenths >= 10240; ++unit) {
    tenths /= 1024;
  }
  const std::string fraction = unit == 0 || tenths % 10 == 0 ? std::string() : "." + std::to_string(tenths % 10);
  return std::to_string(tenths / 10) + fraction + " " + kUnits[unit];
}

class Drawing {
 public:
  Drawing(const Runtime& runtime, const DrawnGraph& drawn)
      : drawn_(drawn),
        nodes_(runtime.nodes(graph())),
        names_(drawn.backward ? drawn.call.backward.names : drawn.call.forward.names),
        branches_(branches_of(nodes_)) {
    const CapturedCall& call = drawn.call;
    name_event(call.forward.done.native(), "done");
    name_event(call.backward.done.native(), "done");
    for (const CapturedCopies::Group& group : call.copies.captured.groups) {
      for (const ExternalEvent& event : group.ready) {
        name_event(event.native(), "ready, group " + group.site.text());
      }
    }
  }

  std::string draw() {
    text_ = "digraph " + in_quotes(title()) + " {\n";
    text_ += "  label=" + in_quotes(title() + "\n" + drawn_.stream + "; " + std::to_string(nodes_.size()) + " nodes") +
             ";\n  labelloc=t;\n  fontname=Helvetica;\n";
    text_ += "  node [shape=box, style=filled, fontname=Helvetica, fontsize=10];\n";
    text_ += "  edge [fontname=Helvetica, fontsize=9];\n";
    draw_nodes();
    draw_memory();
    if (!drawn_.call.copies.captured.empty()) {
      drawn_.backward ? draw_reload_copies() : draw_offload_copies();
    }
    draw_caller();
    return text_ + "}\n";
  }

 private:
  [[nodiscard]] const Graph& graph() const {
    return drawn_.backward ? drawn_.call.backward.graph : drawn_.call.forward.graph;
  }
  [[nodiscard]] std::string title() const {
    return "graphed call " + drawn_.call.spec.name + (drawn_.backward ? ", backward" : ", forward");
  }
  void name_event(const void* event, std::string name) { events_.emplace(event, std::move(name)); }
  [[nodiscard]] std::string event_name(const void* event) const {
    const auto known = events_.find(event);
    return known == events_.end() ? "an event of the caller's" : known->second;
  }

  /// The same colour for the same scope.
  std::string colour(std::string_view scope) {
    static constexpr std::array<const char*, 8> kColours{"#dce9f7", "#e2f2dc", "#fbe9d0", "#f3def2",
                                                         "#fff6bf", "#d9f1ef", "#f7dcdc", "#e6e6e6"};
    const auto known = scopes_.emplace(std::string(scope), scopes_.size()).first;
    return kColours[known->second % kColours.size()];
  }

  [[nodiscard]] std::string words(std::size_t index) const {
    const GraphNode& node = nodes_[index];
    const NodeNames::Name name = names_.of(index);
    const auto known_as = [&](const char* kind) {
      std::string text = name.work.empty() ? std::string(node.name.empty() ? kind : node.name) : std::string(name.work);
      if (!node.name.empty() && !name.work.empty() && name.work.find(node.name) == std::string_view::npos) {
        text += "\n" + node.name.substr(0, 60);
      }
      return text;
    };
    const std::string bytes = node.bytes == 0 ? std::string() : "\n" + size_in_words(node.bytes);
    switch (node.kind) {
      case GraphNode::Kind::kernel:
        return known_as("kernel");
      case GraphNode::Kind::copy_to_host:
        return known_as("copy to the host") + bytes;
      case GraphNode::Kind::copy_to_device:
        return known_as("copy to the device") + bytes;
      case GraphNode::Kind::copy:
        return known_as("copy") + bytes;
      case GraphNode::Kind::memset:
        return known_as("memset") + bytes;
      case GraphNode::Kind::event_record:
        return "record " + event_name(node.event);
      case GraphNode::Kind::event_wait:
        return "wait for " + event_name(node.event);
      case GraphNode::Kind::empty:
        return "join";
      case GraphNode::Kind::host:
        return known_as("host function");
      case GraphNode::Kind::child:
        return known_as("child graph");
      case GraphNode::Kind::other:
        return known_as("other");
    }
    return {};
  }

  void draw_nodes() {
    const std::size_t branches = branches_.empty() ? 0 : *std::max_element(branches_.begin(), branches_.end()) + 1;
    for (std::size_t branch = 0; branch < branches; ++branch) {
      const std::string label = branch == 0 ? drawn_.stream : "forked stream " + std::to_string(branch);
      text_ += "  subgraph cluster_branch" + std::to_string(branch) + " {\n    label=" + in_quotes(label) +
               ";\n    color=gray;\n";
      for (std::size_t i = 0; i < nodes_.size(); ++i) {
        if (branches_[i] == branch) {
          draw_node(i);
        }
      }
      text_ += "  }\n";
    }
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      for (const std::uint32_t before : nodes_[i].predecessors) {
        text_ += "  n" + std::to_string(before) + " -> n" + std::to_string(i) + ";\n";
      }
    }
  }

  void draw_node(std::size_t index) {
    const NodeNames::Name name = names_.of(index);
    const bool event =
        nodes_[index].kind == GraphNode::Kind::event_record || nodes_[index].kind == GraphNode::Kind::event_wait;
    std::string label = words(index);
    if (!name.scope.empty() && !event) {
      label += "\n" + std::string(name.scope);
    }
    text_ += "    n" + std::to_string(index) + " [label=" + in_quotes(label);
    text_ += event ? ", shape=ellipse, fillcolor=white" : ", fillcolor=" + in_quotes(colour(name.scope));
    text_ += "];\n";
  }

  static std::string of_tensor(const char* what, std::size_t index, const at::Tensor& tensor) {
    return std::string(what) + " " + std::to_string(index) + ": " +
           (tensor.defined() ? size_in_words(tensor.nbytes()) : std::string("none"));
  }

  void draw_memory() {
    const CapturedCall& call = drawn_.call;
    std::string lines;
    for (std::size_t i = 0; i < call.inputs.size(); ++i) {
      const StaticInput& input = call.inputs[i];
      lines +=
          of_tensor(drawn_.backward ? "gradient of input" : "input", i, drawn_.backward ? input.grad : input.tensor);
      lines += !drawn_.backward && input.from ? " (output " + std::to_string(input.from->index) + " of call " +
                                                    std::to_string(input.from->call) + ")\\l"
                                              : "\\l";
    }
    for (std::size_t i = 0; i < call.outputs.size(); ++i) {
      lines += of_tensor(drawn_.backward ? "gradient of output" : "output", i,
                         drawn_.backward ? call.outputs[i].seed : call.outputs[i].tensor) +
               "\\l";
    }
    std::size_t parameters = 0;
    for (const CallParameter& parameter : call.parameters) {
      parameters += parameter.tensor.nbytes();
    }
    lines += "parameters: " + std::to_string(call.parameters.size()) + ", " + size_in_words(parameters) + "\\l";
    text_ += "  memory [shape=note, fillcolor=white, label=\"" + lines + "\"];\n";
  }

  /// A group's copies as one node; the first node of the stream.
  void draw_groups(const char* cluster, const char* stream) {
    const CapturedCopies& copies = drawn_.call.copies.captured;
    text_ +=
        std::string("  subgraph cluster_") + cluster + " {\n    label=" + in_quotes(stream) + ";\n    color=gray;\n";
    std::size_t begin = 0;
    for (std::size_t g = 0; g < copies.groups.size(); ++g) {
      std::size_t bytes = 0;
      const std::size_t count = copies.groups[g].end - begin;
      for (; begin < copies.groups[g].end; ++begin) {
        bytes += copies.copies[begin].bytes;
      }
      text_ += "    c" + std::to_string(g) + " [fillcolor=" + in_quotes(colour(copies.groups[g].site.text())) +
               ", label=" +
               in_quotes("group " + copies.groups[g].site.text() + "\n" + std::to_string(count) +
                         (count == 1 ? " copy, " : " copies, ") + size_in_words(bytes)) +
               "];\n";
      if (g > 0) {
        text_ += "    c" + std::to_string(g - 1) + " -> c" + std::to_string(g) + ";\n";
      }
    }
    text_ += "  }\n";
  }

  void draw_offload_copies() {
    draw_groups("offloads", "copies to the host, beside the graph");
    const auto& groups = drawn_.call.copies.captured.groups;
    for (std::size_t g = 0; g < groups.size(); ++g) {
      for (std::size_t i = 0; i < nodes_.size(); ++i) {
        const bool ready = std::any_of(groups[g].ready.begin(), groups[g].ready.end(), [&](const ExternalEvent& event) {
          return nodes_[i].kind == GraphNode::Kind::event_record && nodes_[i].event == event.native();
        });
        if (ready) {
          text_ += "  n" + std::to_string(i) + " -> c" + std::to_string(g) + " [style=dashed, label=\"ready\"];\n";
        }
      }
    }
  }

  void draw_reload_copies() {
    draw_groups("reloads", "copies to the device, beside the graph");
    const std::size_t last = drawn_.call.copies.captured.groups.size() - 1;
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (nodes_[i].predecessors.empty()) {
        text_ += "  c" + std::to_string(last) + " -> n" + std::to_string(i) + " [style=dashed, label=\"reloaded\"];\n";
      }
    }
  }

  void draw_caller() {
    const void* const done = (drawn_.backward ? drawn_.call.backward.done : drawn_.call.forward.done).native();
    text_ += "  caller [label=\"the caller's stream goes on\", shape=box, style=\"dashed\"];\n";
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      if (nodes_[i].kind == GraphNode::Kind::event_record && nodes_[i].event == done) {
        text_ += "  n" + std::to_string(i) + " -> caller [style=dashed, label=\"done\"];\n";
      }
    }
  }

  const DrawnGraph& drawn_;
  std::vector<GraphNode> nodes_;
  const NodeNames& names_;
  std::vector<std::size_t> branches_;
  std::unordered_map<const void*, std::string> events_;
  std::unordered_map<std::string, std::size_t> scopes_;
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
}

/// A name in the folder of `path` that no other process uses.
std::string partial_name(const std::string& path) { return path + "." + std::to_string(getpid()) + ".partial"; }

/// A folder that takes no file is refused before there is something to lose.
void check_folder(const std::string& folder) {
  const std::string probe = partial_name(folder + "/graphs");
  const int descriptor = open(probe.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (descriptor < 0) {
    throw UsageError("the folder \"" + folder +
                     "\" for drawings of graphs cannot be written to: " + std::strerror(errno));
  }
  close(descriptor);
  unlink(probe.c_str());
}

std::string file_name(std::size_t sequence, std::size_t index, const std::string& call, bool backward) {
  constexpr std::size_t kLongest = 100;
  std::string name = std::to_string(sequence) + "_" + std::to_string(index) + "_" + call.substr(0, kLongest);
  for (char& c : name) {
    const bool plain = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' || c == '-' || c == '_';
    c = plain ? c : '_';
  }
  return name + (backward ? "_backward.dot" : "_forward.dot");
}

/// The file is there whole, or as it was.
void write_text(const std::string& path, const std::string& text) {
  const std::string partial = partial_name(path);
  errno = 0;
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

std::vector<std::size_t> branches_of(const std::vector<GraphNode>& nodes) {
  constexpr auto kNone = static_cast<std::size_t>(-1);
  std::vector<std::size_t> branches(nodes.size(), kNone);
  std::vector<bool> continued(nodes.size(), false);
  std::size_t next = 0;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    for (const std::uint32_t before : nodes[i].predecessors) {
      if (branches[before] != kNone && !continued[before]) {
        branches[i] = branches[before];
        continued[before] = true;
        break;
      }
    }
    branches[i] = branches[i] == kNone ? next++ : branches[i];
  }
  return branches;
}

std::string draw_graph(const Runtime& runtime, const DrawnGraph& drawn) { return Drawing(runtime, drawn).draw(); }

std::vector<std::string> write_graph_files(const Runtime& runtime, const EngineSequences& sequences,
                                           const std::string& folder) {
  if (folder.empty()) {
    throw UsageError("OffloadEngine::write_graphs needs the name of a folder");
  }
  make_folder(folder);
  check_folder(folder);
  std::vector<std::string> files;
  std::size_t number = 0;
  sequences.for_each([&](const GraphSequence& sequence) {
    for (std::size_t index = 0; index < sequence.captured().calls.size(); ++index) {
      const CapturedCall& call = sequence.captured().calls[index];
      for (const bool backward : {false, true}) {
        if (!(backward ? call.backward.graph : call.forward.graph)) {
          continue;
        }
        files.push_back(folder + "/" + file_name(number, index, call.spec.name, backward));
        write_text(files.back(),
                   draw_graph(runtime, {call, backward, sequence.streams().in_words(backward ? 0 : index)}));
      }
    }
    ++number;
  });
  return files;
}

}  // namespace sidestream
