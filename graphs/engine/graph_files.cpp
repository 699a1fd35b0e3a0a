#include "graphs/engine/graph_files.h"

#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

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
      break;
    }
  }
}

/// A name beside `path` that no other process uses.
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
    for (std::size_t index = 0; index < sequence.calls().size(); ++index) {
      const CapturedCall& call = sequence.calls()[index];
      for (const bool backward : {false, true}) {
        if (!(backward ? call.backward : call.forward)) {
          continue;
        }
        files.push_back(folder + "/" + file_name(number, index, call.spec.name, backward));
        write_text(files.back(), draw_graph(runtime, {call, backward, sequence.stream_in_words(index, backward)}));
      }
    }
    ++number;
  });
  return files;
}

}  // namespace sidestream
