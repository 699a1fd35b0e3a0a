#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "models/plain_twin.h"
#include "sidestream/engine.h"
#include "sidestream/pipeline_order.h"
#include "unit/graphs/called_stack.h"

namespace sidestream::testing_model {

/// What one rank does next: the forward or backward of one microbatch through one of its model parts.
struct RankWork {
  enum class Kind : std::uint8_t {
    forward,
    backward,
    weights,    ///< the delayed weight gradients of a chunk
    evaluate,   ///< a forward under no_grad
    abandoned,  ///< a forward whose output is dropped: no backward follows
  };
  static constexpr std::size_t kAll = static_cast<std::size_t>(-1);

  Kind kind = Kind::forward;
  std::size_t part = 0;
  std::size_t microbatch = 0;
  std::size_t layer = kAll;  ///< of the part: only this layer runs
};
using RankOrder = std::vector<RankWork>;

/// A rank of a pipeline of `ranks` ranks, with `parts` model parts (virtual stages) a rank.
struct RankPlace {
  std::size_t ranks = 1;
  std::size_t rank = 0;
  std::size_t parts = 1;
};

/// The order of a rank that `pipeline_order` gives: 1F1B, interleaved if the rank has several parts. With delayed weight gradients it is a
/// zero-bubble order.
[[nodiscard]] RankOrder rank_order(const RankPlace& place, std::size_t microbatches, bool delay_weights = false);
/// All forwards, then all backwards.
[[nodiscard]] RankOrder forwards_first(const RankPlace& place, std::size_t microbatches);
/// How many microbatches of each part await their backward, or delayed weight gradients, at most.
[[nodiscard]] std::vector<std::size_t> most_in_flight(const RankPlace& place, const RankOrder& order);

/// Begins, resumes and ends the chunks of an engine's step as their layers run. A chunk has `layers` layers.
class ChunksOfStep {
 public:
  ChunksOfStep(OffloadEngine& engine, std::size_t layers) : engine_(engine), layers_(layers) {}

  /// `layer` of the model is about to run, or has run.
  void before(std::size_t layer, std::size_t microbatch);
  void after(std::size_t layer, std::size_t microbatch);

 private:
  OffloadEngine& engine_;
  std::size_t layers_;
  std::map<std::pair<std::size_t, std::size_t>, Chunk> open_;  // by part and microbatch
};
/// `order` as an engine is told of it, if parts have `layers` layers. A chunk is where its first layer runs.
[[nodiscard]] std::vector<PipelineStep> order_of_chunks(const RankOrder& order, std::size_t layers);

/// Runs orders on the model parts of one rank. Activations and gradients of other ranks are fixed random tensors.
class Rank {
 public:
  /// Runs `layer` of the model for `microbatch`.
  using RunLayer = std::function<at::Tensor(std::size_t layer, std::size_t microbatch, const at::Tensor& h)>;
  /// Computes the delayed weight gradients of a chunk.
  using RunWeights = std::function<void(std::size_t part, std::size_t microbatch)>;

  /// Part p has the `layers` layers from p * `layers` on. `cut`: all layers are detached from each other.
  Rank(const RankPlace& place, std::size_t layers, c10::Device device, bool cut, RunLayer run, RunWeights weights = {})
      : place_(place),
        layers_(layers),
        device_(device),
        cut_(cut),
        run_(std::move(run)),
        weights_(std::move(weights)) {}

  /// `s`: the step, for its data. Gives the gradients of inputs, and the outputs that no backward needs, in the order in which they came.
  StepTensors run(const RankOrder& order, std::int64_t s);

 private:
  /// One microbatch in one part.
  struct Chunk {
    std::vector<at::Tensor> inputs;   // by layer, if it is the first of a part or cut off
    std::vector<at::Tensor> outputs;  // by layer
  };
  [[nodiscard]] at::Tensor input_of(const RankWork& work, std::int64_t s) const;
  void forward(const RankWork& work, std::size_t layer, std::int64_t s);
  void backward(const RankWork& work, std::size_t layer, std::int64_t s);
  void alone(const RankWork& work, std::int64_t s);

  RankPlace place_;
  std::size_t layers_;
  c10::Device device_;
  bool cut_;
  RunLayer run_;
  RunWeights weights_;
  std::vector<std::vector<Chunk>> chunks_;  // by part and microbatch
  StepTensors given_;
};

}  // namespace sidestream::testing_model
