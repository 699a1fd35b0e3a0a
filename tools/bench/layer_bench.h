#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <nlohmann/json.hpp>

#include "sidestream/sidestream.h"
#include "tools/bench/block_stack.h"
#include "tools/bench/step_time.h"

namespace sidestream::bench {

struct LayerSettings {
  std::string device = "auto";
  byte_model::ModelShape shape{.layers = 12, .hidden = 4096, .heads = 32, .kv_heads = 8, .ffn = 14336, .seq = 8192};
  std::string dtype = "bfloat16";
  std::vector<std::string> groups{"qkv", "core_attn", "proj", "norm2", "fc1"};
  std::int64_t ranks = 1;         ///< the layers are those of the first of so many
  std::int64_t microbatches = 0;  ///< of a step, in 1F1B order; 0: one, and no chunks
  bool backward_only = false;     ///< not for microbatches
  bool unset_gradients = false;   ///< before each step
  std::int64_t rounds = 15;
  std::int64_t min_kib = 1024;
  std::optional<std::int64_t> lag_mib;
  std::optional<std::int64_t> lookahead_mib;
  std::optional<std::int64_t> host_gib;
  std::string traces;  ///< a folder for a trace of each mode with an engine; empty: none
};

/// What each report on such layers begins with. The numbers of tokens are not among it.
[[nodiscard]] nlohmann::ordered_json report_header(const char* benchmark, const LayerSettings& settings);

/// A way to train the layers.
struct LayerMode {
  std::string name;
  bool graphs = false;
  bool offload = false;
  std::optional<std::int64_t> side_streams = std::nullopt;
  bool window = false;      ///< lag and lookahead as given
  bool everything = false;  ///< each group of a layer is offloaded, not only LayerSettings::groups
  GradientPolicy gradients = GradientPolicy::accumulated;
  std::optional<std::size_t> budget = std::nullopt;  ///< Options::device_budget; offload is its business then
  bool told = true;                                  ///< the engine is told the order of the microbatches
  std::optional<std::int64_t> offloaded_layers = std::nullopt;  ///< the first ones; unset: all
  std::int64_t recomputed_layers = 0;  ///< the first ones; of them only the scope "recomputed" is offloaded
  std::function<at::Tensor(BlockStack&, at::Tensor)> forward = nullptr;  ///< unset: that of the layers
};

/// Transformer layers, trained in each mode with the same weights and inputs.
class LayerBench {
 public:
  LayerBench(const LayerSettings& settings, std::vector<LayerMode> modes);

  [[nodiscard]] const std::vector<LayerMode>& modes() const { return modes_; }
  /// One mode by itself: bytes over weights and gradients, of the first steps (which size, pin and capture) and of later ones.
  [[nodiscard]] nlohmann::ordered_json memory(const LayerMode& mode);
  /// The same of a mode with a budget, with the engine's forecast, and the median time of some steps.
  [[nodiscard]] nlohmann::ordered_json within_budget(const LayerMode& mode);
  /// Of the layers' parameters, in one mode by itself, after a step that replays.
  [[nodiscard]] std::vector<at::Tensor> gradients(const LayerMode& mode);
  /// All modes alive; each round steps through them, in another order than the round before. A mode steps once to warm the clocks and
  /// caches, and then for the watch: its median counts. By mode, then by round.
  [[nodiscard]] std::vector<std::vector<StepTime>> times();

  [[nodiscard]] std::int64_t base_bytes() const { return base_.allocated; }

 private:
  /// After `warm_steps` of a new engine.
  [[nodiscard]] nlohmann::ordered_json memory_of(OffloadEngine* engine, const LayerMode& mode, int warm_steps);
  [[nodiscard]] std::unique_ptr<OffloadEngine> make_engine(const LayerMode& mode) const;
  StepTime step(OffloadEngine* engine, const LayerMode& mode);
  /// Forwards and backwards of all microbatches. `engine`: null if it is told nothing of chunks.
  void run_order(OffloadEngine* engine) const;

  const LayerSettings& settings_;
  c10::Device device_;
  std::vector<PipelineStep> order_;  ///< empty without microbatches
  std::vector<LayerMode> modes_;
  std::shared_ptr<BlockStack> layers_;
  at::Tensor input_;
  at::Tensor output_gradient_;
  MemoryUse base_;
};

}  // namespace sidestream::bench
