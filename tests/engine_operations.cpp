#include "engine_operations.h"

#include <cstdint>
#include <map>
#include <utility>

#include <torch/nn/module.h>

#include "models/waves.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/journal.h"

namespace sidestream::testing_model {
namespace {

/// Null for what the engine does not ask for.
const char* word_of(JournalKind kind) {
  const std::pair<JournalKind, const char*> words[] = {{JournalKind::copy_to_host, "copy_to_host"},
                                                       {JournalKind::copy_to_device, "copy_to_device"},
                                                       {JournalKind::record, "record"},
                                                       {JournalKind::wait, "wait"}};
  for (const auto& [known, word] : words) {
    if (known == kind) {
      return word;
    }
  }
  return nullptr;
}

// Note [Eager choreography], one group in flight: A is the model's stream, B copies to the host, C back.
std::vector<std::string> expected_eager() {
  std::vector<std::string> lines;
  for (int n = 0; n + 1 < kWaves; ++n) {
    lines.push_back("offload waves." + std::to_string(n) +
                    ".act: A.record B.wait B.wait B.copy_to_host B.wait B.copy_to_host B.record" +
                    (n > 0 ? " A.wait" : ""));
  }
  lines.push_back("reload waves.4.act: A.record C.wait C.record");  // its sources were not let go yet
  for (int n = kWaves - 3; n >= 0; --n) {
    lines.push_back("reload waves." + std::to_string(n) +
                    ".act: A.record C.wait C.copy_to_device C.copy_to_device C.record");
    lines.emplace_back(" : A.wait");
  }
  lines.back() += " A.wait B.record A.wait C.record A.wait";
  return lines;
}

/// Letters for the streams of a list, in the order of their first use.
class Letters {
 public:
  std::string operator()(const std::string& stream) {
    return std::string(1, letters_.try_emplace(stream, static_cast<char>('A' + letters_.size())).first->second);
  }

 private:
  std::map<std::string, char> letters_;
};

// Note [Graph choreography]: each graph has a fork of its own for its copies.
std::vector<std::string> expected_graphs(int side_streams) {
  Letters letter;
  std::vector<std::string> lines;
  const std::string main = letter("main");
  // `copied`: the wave whose group the graph of wave `n` offloads; negative: none.
  const auto graph = [&](const std::string& phase, int n, const std::string& side, int joined, int copied,
                         const std::string& line, const std::string& copy) {
    const std::string where = phase + " waves." + std::to_string(n) + ":";
    lines.push_back(where + " " + main + ".record " + side + ".wait");
    for (int copies = 0; copies < joined; ++copies) {
      lines.back() += " " + side + ".wait";
    }
    if (copied < 0) {
      lines.back() += " " + side + ".record " + side + ".record " + main + ".wait";
      return;
    }
    const std::string fork = letter(where);
    lines.push_back(line + " " + side + ".record " + fork + ".wait " + fork + copy + " " + fork + copy);
    lines.push_back(where + " " + side + ".record " + fork + ".record " + side + ".wait " + side + ".record " + main +
                    ".wait");
  };
  const int offloaded = kWaves - side_streams;  // backward needs the last K immediately: they stay
  for (int n = 0; n < kWaves; ++n) {
    const int index = n % side_streams;
    graph("forward", n, letter("side " + std::to_string(index)), index > 0 && n < side_streams ? 1 : 0,
          n < offloaded ? n : -1, "offload waves." + std::to_string(n) + ".act:", ".copy_to_host");
  }
  for (int n = kWaves - 1; n >= 0; --n) {
    graph("backward", n, letter("side 0"), n == kWaves - 1 ? side_streams - 1 : 0, n - 1 < offloaded ? n - 1 : -1,
          "reload waves." + std::to_string(n - 1) + ":", ".copy_to_device");
  }
  lines.push_back(" : " + main + ".wait");
  return lines;
}

}  // namespace

std::vector<std::string> engine_operations(c10::Device device, std::int64_t side_streams) {
  constexpr std::uint64_t kSteps = 4;
  torch::nn::Module model;
  OffloadEngine engine(model, wave_options(device, side_streams).check_steps(kSteps));
  for (std::uint64_t s = 0; s < kSteps; ++s) {
    const at::Tensor x = wave_input(s, 64, device);
    synchronize(device);
    const auto step = engine.step();
    (void)wave_gradient(x);
  }
  synchronize(device);
  const Journal journal = engine.journal();
  std::map<std::uint32_t, char> letters;
  std::vector<std::string> lines;
  std::uint32_t last = 0;
  for (const JournalOperation& operation : journal.operations) {
    const JournalSite& site = journal.sites[operation.site];
    const char* word = word_of(operation.kind);
    if (site.step != kSteps || word == nullptr) {
      continue;
    }
    if (lines.empty() || operation.site != last) {
      lines.push_back(journal.names[site.phase] + " " + journal.names[site.name] + ":");
    }
    last = operation.site;
    const char letter = letters.try_emplace(operation.stream, static_cast<char>('A' + letters.size())).first->second;
    lines.back() += std::string(" ") + letter + "." + word;
  }
  return lines;
}

std::vector<std::string> expected_engine_operations(std::int64_t side_streams) {
  return side_streams == 0 ? expected_eager() : expected_graphs(static_cast<int>(side_streams));
}

}  // namespace sidestream::testing_model
