// One rank of an interleaved pipeline by ss::call.
#include "unit/graphs/called_stack.h"
#include "unit/graphs/engine_program.h"
#include "unit/graphs/rank_pipeline.h"

namespace sidestream::testing_model {
namespace {

/// The first rank of two, with two parts of four layers.
class InterleavedRank final : public EngineProgram {
 public:
  /// `in_order`: each step is told its order. Else its chunks are in flight as they come.
  InterleavedRank(const Runtimes& runtimes, bool in_order) : EngineProgram(runtimes), in_order_(in_order) {
    Options options = Options(device()).min_bytes(1024).graph("layers.*").offload("layers.*.*");
    options.call_options(CallOptions().max_captures(16));
    make_engine(model_, options);
  }
  ~InterleavedRank() override { end(); }

  std::vector<at::Tensor> step(std::int64_t s) override {
    model_.zero_grad();
    std::optional<Step> in_step;
    std::optional<ChunksOfStep> chunks;
    if (engine_) {
      in_step.emplace(in_order_ ? engine_->step(order_of_chunks(order_, kLayers)) : engine_->step());
      chunks.emplace(*engine_, kLayers);
    }
    Rank rank(kPlace, kLayers, device(), /*cut=*/false,
              [&](std::size_t layer, std::size_t microbatch, const at::Tensor& h) {
                if (chunks) {
                  chunks->before(layer, microbatch);
                }
                at::Tensor out = model_.run_layer(layer, h);
                if (chunks) {
                  chunks->after(layer, microbatch);
                }
                return out;
              });
    std::vector<at::Tensor> results;
    for (const auto& [name, gradient] : rank.run(order_, s)) {
      results.push_back(gradient);
    }
    if (in_step) {
      in_step->finish();
    }
    for (const at::Tensor& parameter : model_.parameters()) {
      results.push_back(parameter.grad().clone());
    }
    return results;
  }

 private:
  static constexpr std::size_t kLayers = 4;
  static constexpr RankPlace kPlace{2, 0, 2};
  CalledStack model_{device(), {}, kPlace.parts* kLayers};
  RankOrder order_ = rank_order(kPlace, 4);
  bool in_order_;
};

}  // namespace

std::vector<NamedProgram> pipeline_programs() {
  return {named_program<InterleavedRank>("interleaved_rank", false),
          named_program<InterleavedRank>("interleaved_rank_in_order", true)};
}

}  // namespace sidestream::testing_model
