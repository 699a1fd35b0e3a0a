#include "graphs/engine/graph_files.h"

#include <cctype>
#include <cerrno>
#include <cstring>
#include <fstream>

#include <sys/stat.h>

#include "graphs/engine/graph_drawing.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

// Not std::filesystem: LibTorch exports its own copy of it.
void make_folder(const std::string& folder) {
  for (std::size_t end = folder.find('/', 1);; end = folder.find('/', end + 1)) {
    const std::string path = folder.substr(0, end);
    if (mkdir(path.c_str(), 0777) != 0 && errno != EEXIST) {
      throw UsageError("the folder \"" + path + "\" for drawings of graphs cannot be made: " + std::strerror(errno));
    }
    if (end == std::string::npos) {
      return;
    }
  }
}

std::string file_name(std::size_t chain, std::size_t layer, const std::string& call, bool backward) {
  constexpr std::size_t kLongest = 100;
  std::string name = std::to_string(chain) + "_" + std::to_string(layer) + "_" + call.substr(0, kLongest);
  for (char& c : name) {
    const bool plain = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '.' || c == '-' || c == '_';
    c = plain ? c : '_';
  }
  return name + (backward ? "_backward.dot" : "_forward.dot");
}

void write_text(const std::string& path, const std::string& text) {
  errno = 0;
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (!file) {
    throw UsageError("the drawing of a graph cannot be written to \"" + path + "\": " + std::strerror(errno));
  }
}

}  // namespace

std::vector<std::string> write_graph_files(const Runtime& runtime, const EngineChains& chains,
                                           const std::string& folder) {
  if (folder.empty()) {
    throw UsageError("OffloadEngine::write_graphs needs the name of a folder");
  }
  make_folder(folder);
  std::vector<std::string> files;
  std::size_t number = 0;
  chains.for_each([&](const Chain& chain) {
    for (std::size_t index = 0; index < chain.layers().size(); ++index) {
      const Layer& layer = chain.layers()[index];
      for (const bool backward : {false, true}) {
        if (!(backward ? layer.backward : layer.forward)) {
          continue;
        }
        files.push_back(folder + "/" + file_name(number, index, layer.spec.name, backward));
        write_text(files.back(), draw_graph(runtime, {layer, backward, chain.stream_in_words(index, backward)}));
      }
    }
    ++number;
  });
  return files;
}

}  // namespace sidestream
