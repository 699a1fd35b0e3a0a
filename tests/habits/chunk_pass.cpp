// Steps whose microbatches are chunks.
#include <algorithm>
#include <deque>
#include <stdexcept>

#include "autocast_region.h"
#include "habits/trainer.h"
#include "sidestream/error.h"

namespace sidestream::habits {
namespace {

ChunkId id_of(const PipelineStep& work) { return {work.stage, work.microbatch}; }

/// Throws where `bad` does not throw a UsageError whose text has `part`.
template <class Bad>
void expect_refusal(const Bad& bad, const std::string& part) {
  try {
    bad();
  } catch (const UsageError& error) {
    if (std::string(error.what()).find(part) != std::string::npos) {
      return;
    }
    throw std::runtime_error("expected \"" + part + "\", got: " + error.what());
  }
  throw std::runtime_error("not refused: expected \"" + part + "\"");
}

}  // namespace

/// The chunks of one step, on one side.
class Trainer::ChunkRun {
 public:
  ChunkRun(Trainer& trainer, const StepPlan& plan) : trainer_(trainer), plan_(plan), chunks_(*plan.chunks) {}

  void run() {
    for (std::size_t i = 0; i < chunks_.order.size() && !ended_; ++i) {
      const PipelineStep& work = chunks_.order[i];
      switch (work.kind) {
        case PipelineStep::Kind::forward:
          if (overlaps(i)) {
            overlap(begin(work), begin(chunks_.order[++i]));
          } else {
            forward(begin(work));
          }
          break;
        case PipelineStep::Kind::backward:
          backward(work);
          break;
        case PipelineStep::Kind::weight_gradients:
          compute_weights(work);
          break;
      }
    }
    compute_last_weights();
  }

 private:
  /// One forward, layer by layer.
  struct Forward {
    PipelineStep work;
    std::int64_t number = 0;
    bool alone = false;    ///< no backward follows
    bool outside = false;  ///< of chunks
    std::size_t layer = 0, first = 0, last = 0;
    std::optional<Pass> pass;
    std::optional<Chunk> chunk;
    at::Tensor loss;
    bool ended = false;  ///< or given up
    bool backward_ran = false;
    bool weights_computed = false;
  };

  /// True if the layers of this forward and of the next work, a forward too, run by turns. Those of a forward that is in no chunk would
  /// belong to the other's chunk.
  [[nodiscard]] bool overlaps(std::size_t i) const {
    const bool outside = chunks_.first_outside && forwards_.empty();
    return chunks_.overlap != ChunkPlan::Overlap::none && chunks_.deviation == Deviation::none && !outside &&
           i + 1 < chunks_.order.size() && chunks_.order[i + 1].kind == PipelineStep::Kind::forward;
  }

  Forward& begin(const PipelineStep& work) {
    Forward& forward = forwards_.emplace_back();
    forward.work = work;
    forward.number = static_cast<std::int64_t>(forwards_.size()) - 1;
    forward.outside = chunks_.first_outside && forward.number == 0;
    PipelineStep backward = work;
    backward.kind = PipelineStep::Kind::backward;
    forward.alone = std::find(chunks_.order.begin(), chunks_.order.end(), backward) == chunks_.order.end();
    const std::size_t blocks = trainer_.model_->blocks.size();
    const auto border = [&](std::int64_t stage) {
      return static_cast<std::size_t>(stage) * blocks / static_cast<std::size_t>(chunks_.stages);
    };
    forward.layer = forward.first = border(work.stage);
    forward.last = border(work.stage + 1);
    return forward;
  }

  void forward(Forward& one) {
    deviate(one);
    while (!one.ended && !ended_) {
      run_layer(one);
    }
  }

  void overlap(Forward& one, Forward& other) {
    run_layer(one);
    if (chunks_.overlap == ChunkPlan::Overlap::overtaking) {
      forward(other);
    }
    while (!one.ended || !other.ended) {
      for (Forward* each : {&other, &one}) {
        if (!each->ended) {
          run_layer(*each);
        }
      }
    }
    if (trainer_.with_engine_) {
      trainer_.seen_.add("chunks open at once", 2);
    }
  }

  /// The next layer of a forward; with the stem before the first one, and the head at last.
  void run_layer(Forward& one) {
    const bool first = one.layer == one.first;
    const bool last = one.layer == one.last;
    trainer_.chunk_ = one.outside ? std::nullopt : std::optional(id_of(one.work));
    if (trainer_.engine_ != nullptr && !one.outside) {
      if (first) {
        one.chunk.emplace(trainer_.engine_->chunk(id_of(one.work)));
        trainer_.seen_.add("chunks");
        trainer_.seen_.add("forwards alone", one.alone ? 1 : 0);
      } else {
        one.chunk->resume();
      }
    }
    try {
      const at::AutoGradMode gradients(at::GradMode::is_enabled() && !(one.alone && one.number % 2 == 0));
      pass_layer(one, first, last);
    } catch (const Left&) {
      if (!chunks_.caught) {
        throw;
      }
      give_up(one);
      return;
    }
    ++one.layer;
    if (last) {
      trainer_.losses_.push_back(one.loss.detach());
      one.pass.reset();
      one.ended = true;
      end(one);
    }
  }

  void pass_layer(Forward& one, bool first, bool last) {
    StepPlan plan = plan_;
    const auto layers = static_cast<std::int64_t>(one.last - one.first);
    for (std::int64_t* thrown : {&plan.leave_at, &plan.throw_in_body}) {
      const bool here = *thrown >= 0 && one.number == chunks_.thrown_at && layers > 0;
      *thrown = here ? static_cast<std::int64_t>(one.first) + *thrown % layers : -1;
    }
    if (first) {
      one.pass = trainer_.begin_pass(plan, one.work.microbatch + 20 * one.work.stage);
    }
    std::optional<testing_model::AutocastRegion> region;
    if (plan.autocast != StepPlan::Autocast::off) {
      region.emplace(trainer_.device_.type(), /*cache=*/plan.autocast == StepPlan::Autocast::on);
    }
    if (first) {
      trainer_.pass_stem(*one.pass);
    }
    if (last) {
      one.loss = trainer_.pass_head(*one.pass, plan);
    } else {
      trainer_.pass_block(*one.pass, one.layer, plan);
    }
  }

  void end(Forward& one) {
    const bool stays_open = chunks_.deviation == Deviation::open_chunk && one.number == chunks_.deviation_at;
    one.alone = one.alone || stays_open;
    if (stays_open && one.chunk) {
      trainer_.open_.push_back(std::move(*one.chunk));
    } else if (one.number % 2 == 0 && one.chunk) {
      one.chunk->finish();
    }
    one.chunk.reset();
    trainer_.chunk_.reset();
    if (one.alone) {
      one.loss.reset();
    }
  }

  /// The user's code has thrown, and the trainer goes on without this microbatch.
  void give_up(Forward& one) {
    one.ended = true;
    one.alone = true;
    one.pass.reset();
    end(one);
    trainer_.caught_ = true;
    trainer_.seen_.add("chunks given up", trainer_.with_engine_ ? 1 : 0);
  }

  [[nodiscard]] Forward* found(const PipelineStep& work) {
    for (Forward& one : forwards_) {
      if (id_of(one.work) == id_of(work)) {
        return one.alone ? nullptr : &one;
      }
    }
    return nullptr;
  }

  void backward(const PipelineStep& work) {
    Forward* const one = found(work);
    if (one == nullptr || plan_.grad != StepPlan::Grad::on) {
      return;
    }
    trainer_.backward(one->loss, plan_);
    one->loss.reset();
    one->backward_ran = true;
    if (chunks_.weight_steps) {
      return;
    }
    if (trainer_.delays() && trainer_.weight_time_ == WeightTime::at_once) {
      one->weights_computed = true;
    }
    trainer_.compute_weights_after_backward(one->outside ? std::nullopt : std::optional(id_of(work)));
  }

  void compute_weights(const PipelineStep& work) {
    Forward* const one = found(work);
    const bool last = work == chunks_.order.back();
    if (one == nullptr || !one->backward_ran || (last && trainer_.weight_time_ == WeightTime::forgotten)) {
      return;
    }
    compute_weights(*one);
  }
  void compute_weights(Forward& one) {
    one.weights_computed = true;
    trainer_.compute_weights(one.outside ? std::nullopt : std::optional(id_of(one.work)));
  }

  void compute_last_weights() {
    const bool forgets = trainer_.weight_time_ == WeightTime::forgotten && !plan_.deviates();
    if (trainer_.weight_time_ == WeightTime::reversed || forgets) {
      for (auto one = forwards_.rbegin(); one != forwards_.rend(); ++one) {
        if (one->backward_ran && !one->weights_computed && !(forgets && one->number == forwards_.back().number)) {
          compute_weights(*one);
        }
      }
    }
    if (!forgets) {
      trainer_.compute_weights(std::nullopt);
    }
    const bool twice = chunks_.deviation == Deviation::weights_twice;
    if (trainer_.engine_ != nullptr && (twice || chunks_.deviation == Deviation::weights_of_none)) {
      const ChunkId id = twice ? id_of(forwards_.front().work) : ChunkId{7, 7};
      if (twice && !forwards_.front().weights_computed) {
        trainer_.engine_->backward_dw(id);
      }
      expect_refusal([&] { trainer_.engine_->backward_dw(id); }, twice ? "are computed already" : "has not had");
      refused();
    }
  }

  void refused() { trainer_.seen_.add("deviations refused"); }

  /// What the trainer does wrong before the forward of `next`.
  void deviate(const Forward& next) {
    if (next.number != chunks_.deviation_at) {
      return;
    }
    if (chunks_.deviation == Deviation::missing_chunks) {
      ended_ = true;
    }
    OffloadEngine* const engine = trainer_.engine_.get();
    const bool left = chunks_.deviation == Deviation::left;
    if (engine != nullptr &&
        (left || chunks_.deviation == Deviation::later_chunk || chunks_.deviation == Deviation::unknown_chunk ||
         chunks_.deviation == Deviation::repeated_chunk)) {
      ChunkId wrong{0, 99};
      std::string why = "is not in";
      if (chunks_.deviation == Deviation::repeated_chunk && next.number > 0) {
        wrong = id_of(forwards_.front().work);
        why = "which this step has had";
      } else if (chunks_.deviation != Deviation::unknown_chunk) {
        bool behind = false;
        for (const PipelineStep& work : chunks_.order) {
          if (behind && work.kind == PipelineStep::Kind::forward) {
            wrong = id_of(work);
            why = "comes later";
          }
          behind = behind || work == next.work;
        }
      }
      expect_refusal([&] { (void)engine->chunk(wrong); }, why);
      refused();
    }
    if (left) {
      throw Left();
    }
  }

  Trainer& trainer_;
  const StepPlan& plan_;
  const ChunkPlan& chunks_;
  std::deque<Forward> forwards_;
  bool ended_ = false;  ///< before all of the order has run
};

void Trainer::run_chunks(const StepPlan& plan) { ChunkRun(*this, plan).run(); }

Step Trainer::begin_step(const StepPlan& plan) {
  if (!plan.chunks || !plan.chunks->ordered) {
    return engine_->step();
  }
  if (plan.chunks->deviation == Deviation::bad_order) {
    std::vector<PipelineStep> bad = plan.chunks->order;
    bad.insert(bad.begin(), {0, 50, PipelineStep::Kind::backward});
    bad.push_back({0, 50, PipelineStep::Kind::forward});
    expect_refusal([&] { (void)engine_->step(bad); }, "before the forward of stage 0, microbatch 50");
    seen_.add("deviations refused");
  }
  seen_.add("steps with an order");
  return engine_->step(plan.chunks->order);
}

void Trainer::finish_step(Step& step, const StepPlan& plan) {
  if (plan.chunks && plan.chunks->finish_throws()) {
    const bool open = plan.chunks->deviation == Deviation::open_chunk;
    expect_refusal([&] { step.finish(); }, open ? "a chunk was open" : "missing: ");
    seen_.add("deviations refused");
    return;
  }
  try {
    step.finish();
  } catch (const UsageError& error) {
    missed_weights_ = std::string(error.what()).find("are delayed and were not computed") != std::string::npos;
    if (!missed_weights_ || weight_time_ != WeightTime::forgotten) {
      throw;
    }
    seen_.add("forgotten weight gradients");
  }
}

}  // namespace sidestream::habits
