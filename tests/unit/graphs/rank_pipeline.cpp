#include "unit/graphs/rank_pipeline.h"

#include <algorithm>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

namespace sidestream::testing_model {

RankOrder rank_order(const RankPlace& place, std::size_t microbatches, bool delay_weights) {
  PipelineShape shape;
  shape.ranks = static_cast<std::int64_t>(place.ranks);
  shape.stages = static_cast<std::int64_t>(place.parts);
  shape.microbatches = static_cast<std::int64_t>(microbatches);
  shape.delay_weight_gradients = delay_weights;
  RankOrder order;
  for (const PipelineStep& step : pipeline_order(shape, static_cast<std::int64_t>(place.rank))) {
    using Kind = PipelineStep::Kind;
    order.push_back({step.kind == Kind::forward    ? RankWork::Kind::forward
                     : step.kind == Kind::backward ? RankWork::Kind::backward
                                                   : RankWork::Kind::weights,
                     static_cast<std::size_t>(step.stage), static_cast<std::size_t>(step.microbatch)});
  }
  return order;
}

RankOrder forwards_first(const RankPlace& place, std::size_t microbatches) {
  RankOrder order = rank_order(place, microbatches);
  std::stable_partition(order.begin(), order.end(),
                        [](const RankWork& work) { return work.kind == RankWork::Kind::forward; });
  return order;
}

std::vector<std::size_t> most_in_flight(const RankPlace& place, const RankOrder& order) {
  std::vector<std::size_t> now(place.parts);
  std::vector<std::size_t> most(place.parts);
  const auto is_weights = [](const RankWork& work) { return work.kind == RankWork::Kind::weights; };
  const bool delayed = std::any_of(order.begin(), order.end(), is_weights);
  for (const RankWork& work : order) {
    if (work.layer != RankWork::kAll && work.layer != 0) {
      continue;
    }
    if (work.kind == RankWork::Kind::forward) {
      most[work.part] = std::max(most[work.part], ++now[work.part]);
    } else if (work.kind == (delayed ? RankWork::Kind::weights : RankWork::Kind::backward)) {
      --now[work.part];
    }
  }
  return most;
}

void ChunksOfStep::before(std::size_t layer, std::size_t microbatch) {
  const std::pair<std::size_t, std::size_t> id(layer / layers_, microbatch);
  if (layer % layers_ == 0) {
    open_.emplace(id, engine_.chunk({static_cast<std::int64_t>(id.first), static_cast<std::int64_t>(microbatch)}));
  } else {
    open_.at(id).resume();
  }
}

void ChunksOfStep::after(std::size_t layer, std::size_t microbatch) {
  if (layer % layers_ + 1 == layers_) {
    const auto chunk = open_.find({layer / layers_, microbatch});
    chunk->second.finish();
    open_.erase(chunk);
  }
}

std::vector<PipelineStep> order_of_chunks(const RankOrder& order, std::size_t layers) {
  std::vector<PipelineStep> chunks;
  for (const RankWork& work : order) {
    const bool backward = work.kind == RankWork::Kind::backward;
    if (work.layer == RankWork::kAll || work.layer == (backward ? layers - 1 : 0)) {
      chunks.push_back({static_cast<std::int64_t>(work.part), static_cast<std::int64_t>(work.microbatch),
                        backward                               ? PipelineStep::Kind::backward
                        : work.kind == RankWork::Kind::weights ? PipelineStep::Kind::weight_gradients
                                                               : PipelineStep::Kind::forward});
    }
  }
  return chunks;
}

StepTensors Rank::run(const RankOrder& order, std::int64_t s) {
  chunks_.assign(place_.parts, {});
  given_.clear();
  for (const RankWork& work : order) {
    std::vector<Chunk>& microbatches = chunks_[work.part];
    microbatches.resize(std::max(microbatches.size(), work.microbatch + 1));
    if (work.kind == RankWork::Kind::weights) {
      if (weights_) {
        weights_(work.part, work.microbatch);
      }
    } else if (work.kind == RankWork::Kind::evaluate || work.kind == RankWork::Kind::abandoned) {
      alone(work, s);
    } else if (work.kind == RankWork::Kind::forward) {
      Chunk& chunk = microbatches[work.microbatch];
      chunk.inputs.resize(layers_);
      chunk.outputs.resize(layers_);
      for (std::size_t layer = 0; layer < layers_; ++layer) {
        if (work.layer == RankWork::kAll || work.layer == layer) {
          forward(work, layer, s);
        }
      }
    } else {
      for (std::size_t layer = layers_; layer-- > 0;) {
        if (work.layer == RankWork::kAll || work.layer == layer) {
          backward(work, layer, s);
        }
      }
    }
  }
  return std::move(given_);
}

at::Tensor Rank::input_of(const RankWork& work, std::int64_t s) const {
  const at::Tensor given =
      rows(100 * s + static_cast<std::int64_t>(work.microbatch), device_, static_cast<std::int64_t>(100 + work.part));
  const bool data = place_.rank == 0 && work.part == 0;  // no gradient goes there
  return data ? given : given.requires_grad_(true);
}

void Rank::forward(const RankWork& work, std::size_t layer, std::int64_t s) {
  Chunk& chunk = chunks_[work.part][work.microbatch];
  at::Tensor h;
  if (layer == 0) {
    h = chunk.inputs[0] = input_of(work, s);
  } else if (cut_) {
    h = chunk.inputs[layer] = chunk.outputs[layer - 1].detach().requires_grad_(true);
  } else {
    h = std::move(chunk.outputs[layer - 1]);
  }
  chunk.outputs[layer] = run_(work.part * layers_ + layer, work.microbatch, h);
}

void Rank::backward(const RankWork& work, std::size_t layer, std::int64_t s) {
  Chunk& chunk = chunks_[work.part][work.microbatch];
  const at::Tensor output = std::move(chunk.outputs[layer]);
  if (layer + 1 < layers_) {
    if (cut_) {
      output.backward(chunk.inputs[layer + 1].grad());
      chunk.inputs[layer + 1] = at::Tensor();
    }
  } else {
    const at::Tensor given =
        rows(100 * s + static_cast<std::int64_t>(work.microbatch), device_, static_cast<std::int64_t>(200 + work.part));
    if (place_.rank + 1 == place_.ranks && work.part + 1 == place_.parts) {
      (output * given).mean().backward();
    } else {
      output.backward(given);
    }
  }
  if (layer == 0 && chunk.inputs[0].requires_grad()) {
    given_.emplace_back("gradient of the input of part " + std::to_string(work.part) + ", microbatch " +
                            std::to_string(work.microbatch),
                        chunk.inputs[0].grad());
  }
}

void Rank::alone(const RankWork& work, std::int64_t s) {
  const at::AutoGradMode gradients(work.kind == RankWork::Kind::abandoned);
  at::Tensor h = input_of(work, s);
  for (std::size_t layer = 0; layer < layers_; ++layer) {
    h = run_(work.part * layers_ + layer, work.microbatch, h);
  }
  given_.emplace_back("output of part " + std::to_string(work.part), h);
}

}  // namespace sidestream::testing_model
