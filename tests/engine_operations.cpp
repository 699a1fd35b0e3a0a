#include "engine_operations.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>

#include <torch/nn/module.h>

#include "models/scoped_waves.h"
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
  lines.push_back("offload waves." + std::to_string(kWaves - 1) +
                  ".act: A.wait");  // it is needed immediately, in place of the one before
  for (int n = kWaves - 2; n >= 0; --n) {
    lines.push_back("reload waves." + std::to_string(n) +
                    ".act: A.record C.wait C.copy_to_device C.copy_to_device C.record");
    lines.emplace_back(" : A.wait");
  }
  lines.back() += " B.record A.wait C.record A.wait";
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

// Note [Graph choreography], in sequences as deep as they have side streams: wave n leaves while the K waves behind it run.
std::vector<std::string> expected_graphs(int side_streams) {
  Letters letter;
  std::vector<std::string> lines;
  const std::string main = letter("main");
  const auto wave = [](const char* phase, int n) { return std::string(phase) + " waves." + std::to_string(n); };
  const int offloaded = kWaves - side_streams;  // the last K are needed immediately: they stay
  for (int n = 0; n < kWaves; ++n) {
    const std::string side = letter("side " + std::to_string(n % side_streams));
    const std::string behind_left = n >= side_streams ? " " + side + ".wait" : "";
    lines.push_back(wave("forward", n) + ": " + main + ".record " + side + ".wait" + behind_left);
    if (n >= offloaded) {
      lines.back() += " " + side + ".record " + main + ".wait";
      continue;
    }
    lines.push_back(wave("offload", n) + ".act: " + side + ".record");
    lines.push_back(wave("forward", n) + ": " + side + ".record " + main + ".wait");
    const std::string out = letter("copies out");
    lines.push_back(wave("offload", n) + ".act: " + out + ".wait " + out + ".copy_to_host " + out + ".copy_to_host " +
                    out + ".record");
  }
  const std::string side = letter("side 0");
  for (int n = kWaves - 1; n >= 0; --n) {
    lines.push_back(wave("backward", n) + ": " + main + ".record " + side + ".wait");
    const int returning = n - std::max(1, side_streams - 1);  // one ahead, and what the memory of the lag has room for
    if (returning >= 0 && returning < offloaded) {
      const std::string in = letter("copies in");
      lines.back() += " " + side + ".record " + in + ".wait";
      lines.push_back(wave("reload", returning) + ": " + in + ".copy_to_device " + in + ".copy_to_device " + in +
                      ".record");
      lines.push_back(wave("backward", n) + ":");
    }
    lines.back() += (n < offloaded ? " " + side + ".wait" : "") + " " + side + ".record " + main + ".wait";
  }
  return lines;
}

}  // namespace

std::vector<std::string> engine_operations(c10::Device device, std::int64_t side_streams) {
  constexpr std::uint64_t kSteps = 4;
  torch::nn::Module model;
  OffloadEngine engine(model, scoped_wave_options(device, side_streams).check_steps(kSteps));
  for (std::uint64_t s = 0; s < kSteps; ++s) {
    const at::Tensor x = scoped_wave_input(s, 64, device);
    synchronize(device);
    const auto step = engine.step();
    (void)scoped_wave_gradient(x);
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
