#include "unit/graphs/rank_training.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/pipeline_order.h"
#include "unit/graphs/called_stack.h"

namespace sidestream::testing_model {
namespace {

/// A layer of a hybrid model that is not graphed.
bool stays_eager(const RankProgram& program, std::size_t layer) {
  return program.extra == RankExtra::hybrid && layer % 2 == 1;
}

GraphOptions graph_options(const RankProgram& program) {
  GraphOptions options = GraphOptions().num_warmup_iters(1);
  if (program.schedule == RankSchedule::zero_bubble) {
    options.gradients("**", GradientPolicy::delayed);
  }
  return options;
}

/// Callables for each part: a set for each microbatch in flight, and one for forwards without a backward. In order they are one set for
/// all, made again for another order.
class RankCallables {
 public:
  RankCallables(OffloadEngine& engine, CalledStack& model, const RankProgram& program, c10::Device device,
                bool in_order)
      : engine_(engine), model_(model), program_(program), device_(device), in_order_(in_order) {
    if (in_order) {
      return;
    }
    for (std::size_t step = 0; step < program.microbatches.size(); ++step) {
      for (const std::size_t most : most_in_flight(program.place, program.order(step))) {
        in_flight_ = std::max(in_flight_, most);
      }
    }
    for (std::size_t part = 0; part < program.place.parts; ++part) {
      for (std::size_t slot = 0; slot < in_flight_ + 1; ++slot) {
        make(part, part + 1, slot, graph_options(program));
      }
    }
  }
  /// Gives each chunk a set that no chunk in flight has.
  void begin_step(const RankOrder& order) {
    slots_.clear();
    if (in_order_) {
      RankOrder ends = order;  // a backward is where its last layer runs
      for (RankWork& work : ends) {
        if (work.kind == RankWork::Kind::backward && work.layer != RankWork::kAll) {
          work.layer = program_.layers - 1 - work.layer;
        }
      }
      begin_step(order_of_chunks(ends, program_.layers));
      return;
    }
    std::map<std::size_t, std::set<std::size_t>> taken;  // by part
    for (const RankWork& work : order) {
      const std::pair<std::size_t, std::size_t> chunk(work.part, work.microbatch);
      const bool first = work.layer == RankWork::kAll || work.layer == 0;
      if (first && work.kind == RankWork::Kind::forward) {
        std::size_t slot = 0;
        while (taken[work.part].count(slot) != 0) {
          ++slot;
        }
        taken[work.part].insert(slots_[chunk] = slot);
      } else if (first && work.kind == (program_.schedule == RankSchedule::zero_bubble ? RankWork::Kind::weights
                                                                                       : RankWork::Kind::backward)) {
        taken[work.part].erase(slots_[chunk]);
      } else if (first && (work.kind == RankWork::Kind::evaluate || work.kind == RankWork::Kind::abandoned)) {
        slots_[chunk] = in_flight_;
      }
    }
  }
  at::Tensor operator()(std::size_t layer, std::size_t microbatch, const at::Tensor& h) const {
    const auto graphed = graphed_.find({layer, slots_.at({layer / program_.layers, microbatch})});
    return graphed == graphed_.end() ? model_.run_layer(layer, h) : graphed->second({h})[0];
  }

 private:
  /// In order; a chunk without a backward runs eagerly.
  void begin_step(const std::vector<PipelineStep>& order) {
    if (order != made_for_) {
      graphed_.clear();
      make(0, program_.place.parts, 0, graph_options(program_).order(order));
      made_for_ = order;
    }
    for (const PipelineStep& step : order) {
      slots_[{static_cast<std::size_t>(step.stage), static_cast<std::size_t>(step.microbatch)}] =
          step.kind == PipelineStep::Kind::forward ? 1 : 0;
    }
  }
  /// Those of parts [first, last), as one set.
  void make(std::size_t first, std::size_t last, std::size_t slot, const GraphOptions& options) {
    std::vector<Callable> callables;
    std::vector<std::vector<Sample>> samples;
    std::vector<std::size_t> layers;
    for (std::size_t layer = first * program_.layers; layer < last * program_.layers; ++layer) {
      if (stays_eager(program_, layer)) {
        continue;
      }
      const bool linked =
          !layers.empty() && layers.back() + 1 == layer && layer % program_.layers != 0 && !program_.cut();
      const bool data = program_.place.rank == 0 && layer == 0;
      samples.push_back({linked ? Sample::output_of(static_cast<std::int64_t>(layers.size()) - 1)
                                : Sample(rows(900, device_).requires_grad_(!data))});
      callables.emplace_back("layers." + std::to_string(layer),
                             *(model_.layers->begin() + static_cast<std::ptrdiff_t>(layer)));
      if (in_order_) {
        callables.back().stage(static_cast<std::int64_t>(layer / program_.layers));
      }
      layers.push_back(layer);
    }
    const std::vector<GraphedCallable> made = make_graphed_callables(engine_, callables, samples, options);
    for (std::size_t i = 0; i < layers.size(); ++i) {
      graphed_.insert({{layers[i], slot}, made[i]});
    }
  }

  OffloadEngine& engine_;
  CalledStack& model_;
  const RankProgram& program_;
  c10::Device device_;
  bool in_order_;
  std::vector<PipelineStep> made_for_;
  std::size_t in_flight_ = 1;
  std::map<std::pair<std::size_t, std::size_t>, GraphedCallable> graphed_;  // by layer and slot
  std::map<std::pair<std::size_t, std::size_t>, std::size_t> slots_;        // by part and microbatch
};

Options rank_options(const RankProgram& program, RankWay way, c10::Device device) {
  Options options = Options(device).min_bytes(1024);
  CallOptions calls = CallOptions().max_captures(64);
  if (way == RankWay::shared) {
    calls.share_memory(true).on_pending(OnPending::eager);
  }
  options.check_steps(8).call_options(calls).graph_options(graph_options(program));
  for (std::size_t layer = 0; layer < program.place.parts * program.layers; ++layer) {
    const std::string name = "layers." + std::to_string(layer);
    if ((way == RankWay::calls || way == RankWay::shared) && !stays_eager(program, layer)) {
      options.graph(name);
    }
    if (program.extra != RankExtra::hybrid || layer % 3 != 2) {
      options.offload(name + ".*");
    }
  }
  return options;
}

std::string name_of_way(RankWay way) {
  switch (way) {
    case RankWay::eager:
      return "eager";
    case RankWay::calls:
      return "calls";
    case RankWay::shared:
      return "shared_memory";
    case RankWay::callables:
      return "callables";
    case RankWay::ordered_callables:
      return "callables_captured_in_order";
  }
  return "";
}

}  // namespace

std::string name_of_rank(const testing::TestParamInfo<RankParameter>& info) {
  const auto& [program, way, chunks] = info.param;
  return program.name + "_" + name_of_way(way) +
         (chunks == RankChunks::none    ? ""
          : chunks == RankChunks::begun ? "_in_chunks"
                                        : "_in_order");
}

void train_rank(const RankProgram& program, RankWay way, RankChunks chunks, c10::Device device,
                const RankCheck& check) {
  const auto layers = static_cast<std::int64_t>(program.place.parts * program.layers);
  CalledStack model(device, {}, layers);
  CalledStack plain(device, {}, layers);
  OffloadEngine engine(model, rank_options(program, way, device));
  std::unique_ptr<RankCallables> callables;
  if (way == RankWay::callables || way == RankWay::ordered_callables) {
    callables =
        std::make_unique<RankCallables>(engine, model, program, device, /*in_order=*/way == RankWay::ordered_callables);
  }
  ChunksOfStep open(engine, program.layers);
  Rank mine(
      program.place, program.layers, device, program.cut(),
      [&](std::size_t layer, std::size_t microbatch, const at::Tensor& h) {
        if (chunks != RankChunks::none) {
          open.before(layer, microbatch);
        }
        const at::Tensor out = callables != nullptr ? (*callables)(layer, microbatch, h) : model.run_layer(layer, h);
        if (chunks != RankChunks::none) {
          open.after(layer, microbatch);
        }
        return out;
      },
      [&](std::size_t part, std::size_t microbatch) {
        if (chunks == RankChunks::none) {
          engine.backward_dw();
        } else {
          engine.backward_dw({static_cast<std::int64_t>(part), static_cast<std::int64_t>(microbatch)});
        }
      });
  Rank other(
      program.place, program.layers, device, program.cut(),
      [&](std::size_t layer, std::size_t /*microbatch*/, const at::Tensor& h) { return plain.run_layer(layer, h); });
  for (std::size_t step = 0; step < program.microbatches.size(); ++step) {
    const testing::ScopedTrace in_step(__FILE__, __LINE__, "step " + std::to_string(step));
    const RankOrder order = program.order(step);
    if (callables != nullptr) {
      callables->begin_step(order);
    }
    const auto s = static_cast<std::int64_t>(step);
    StepTensors given;
    StepTensors expected;
    const StepTensors after = train_step(model, nullptr, [&] {
      Step in_step =
          chunks == RankChunks::ordered ? engine.step(order_of_chunks(order, program.layers)) : engine.step();
      given = mine.run(order, s);
      in_step.finish();
    });
    const StepTensors plainly = train_step(plain, nullptr, [&] { expected = other.run(order, s); });
    ASSERT_TRUE(same(given, expected));
    ASSERT_TRUE(same(after, plainly));
    check(step, order, engine.report());
  }
}

}  // namespace sidestream::testing_model
