#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <torch/nn/module.h>

#include "examples/byte_model/byte_model.h"
#include "sidestream/sidestream.h"
#include "tools/bench/step_time.h"

namespace sidestream::bench {

struct StepSettings {
  std::string device = "auto";
  std::string model = "tiny";
  byte_model::ModelShape shape{.layers = 12, .hidden = 1024, .heads = 16, .kv_heads = 4, .ffn = 2816, .seq = 1024};
  std::int64_t batch = 1;
  std::string dtype = "bfloat16";
  std::int64_t rounds = 30;
  std::string offload = "blocks.**";  ///< Options::offload of modes with offload
  std::int64_t min_kib = 256;         ///< smaller storages stay on the device
  std::int64_t block = 0;             ///< see `steps_in_a_block`
  std::vector<std::string> modes;
  std::string report;

  /// Steps that are timed together, without a wait between them; not given: 20 tiny ones, else 1.
  [[nodiscard]] std::int64_t steps_in_a_block() const {
    constexpr std::int64_t kTiny = 20;
    return block > 0 ? block : model == "tiny" ? kTiny : 1;
  }
};

/// A way to run forward, backward and the optimizer.
struct StepMode {
  enum class Graphs : std::uint8_t { none, layers, step };
  std::string name;
  Graphs graphs = Graphs::none;
  bool offload = false;
};

/// All there are, in the order in which they are measured.
[[nodiscard]] const std::vector<StepMode>& step_modes();

/// A model in training in one mode, with weights, gradients and optimizer of its own.
class TrainedInMode {
 public:
  TrainedInMode(const StepSettings& settings, c10::Device device, StepMode mode);

  void step();
  /// Of a whole step: its launch alone, on `stream`.
  void launch(c10::Stream stream);
  [[nodiscard]] const StepMode& mode() const noexcept { return mode_; }
  /// In a step. Bytes.
  [[nodiscard]] std::int64_t offloaded_bytes() const;
  [[nodiscard]] std::int64_t captures() const { return engine_ ? engine_->report().captures : 0; }

 private:
  StepMode mode_;
  std::shared_ptr<torch::nn::Module> model_;
  std::function<Tensors(const Tensors&)> loss_;
  Tensors inputs_;
  std::optional<AdamW> optimizer_;
  std::optional<OffloadEngine> engine_;  // behind the model whose calls it holds: it goes first
  std::optional<GraphedStep> whole_;
};

/// What was measured of one mode, by round; or of the bare launch of its graph.
struct ModeTimes {
  std::string name;
  std::vector<StepTime> steps;
  std::vector<StepTime> launches;  ///< of a whole step's graph, in the same rounds
  std::int64_t offloaded_bytes = 0;
  std::int64_t captures = 0;
};

/// All modes alive; each round steps through them in another order than the round before. A mode steps once to warm the clocks and
/// caches, then in blocks for the watch: their median counts.
[[nodiscard]] std::vector<ModeTimes> time_modes(const StepSettings& settings);

}  // namespace sidestream::bench
