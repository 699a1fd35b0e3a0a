#include "habits/chunk_plan.h"

#include <algorithm>
#include <iterator>
#include <random>
#include <utility>

#include "habits/step_plan.h"

namespace sidestream::habits {
namespace {

using Work = PipelineStep::Kind;

/// What else the steps of chunks do.
constexpr Kind kUses[] = {Kind::train,          Kind::leave_step,        Kind::throw_in_body,    Kind::other_rows,
                          Kind::clip,           Kind::evaluate,          Kind::memory,           Kind::aliased_argument,
                          Kind::other_scale,    Kind::inplace_on_output, Kind::keep_output,      Kind::skip_block,
                          Kind::repeat_block,   Kind::unused_output,     Kind::unused_aux,       Kind::input_gradient,
                          Kind::autocast,       Kind::other_stream,      Kind::other_thread,     Kind::keep_gradients,
                          Kind::hook_on_output, Kind::struct_argument,   Kind::validate_pending, Kind::no_grad_prefix,
                          Kind::nested_engine,  Kind::validate_between};
static_assert(std::size(kUses) * 3 * 4 == kChunkUses);

/// Takes the digits of a number, the last one first.
class Digits {
 public:
  explicit Digits(std::int64_t number) : number_(number) {}
  std::int64_t below(std::int64_t bound) {
    const std::int64_t digit = number_ % bound;
    number_ /= bound;
    return digit;
  }

 private:
  std::int64_t number_;
};

/// Each chunk's forward before its backward, and that before its weight gradients.
std::vector<PipelineStep> random_order(std::int64_t stages, std::int64_t microbatches, bool weights, unsigned seed) {
  std::minstd_rand random(seed + 1);
  std::vector<PipelineStep> ready;
  for (std::int64_t m = 0; m < microbatches; ++m) {
    for (std::int64_t s = 0; s < stages; ++s) {
      ready.push_back({s, m, Work::forward});
    }
  }
  std::vector<PipelineStep> order;
  while (!ready.empty()) {
    const std::size_t at = random() % std::min<std::size_t>(ready.size(), 5);
    order.push_back(ready[at]);
    if (ready[at].kind == Work::forward) {
      ready[at].kind = Work::backward;
    } else if (ready[at].kind == Work::backward && weights) {
      ready[at].kind = Work::weight_gradients;
    } else {
      ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(at));
    }
  }
  return order;
}

/// One chunk behind the other; or all forwards, and then the backwards from the last one on.
std::vector<PipelineStep> simple_order(std::int64_t stages, std::int64_t microbatches, bool in_flight) {
  std::vector<PipelineStep> order, backwards;
  for (std::int64_t m = 0; m < microbatches; ++m) {
    for (std::int64_t s = 0; s < stages; ++s) {
      order.push_back({s, m, Work::forward});
      if (in_flight) {
        backwards.insert(backwards.begin(), {s, m, Work::backward});
      } else {
        order.push_back({s, m, Work::backward});
      }
    }
  }
  order.insert(order.end(), backwards.begin(), backwards.end());
  return order;
}

std::vector<PipelineStep> order_of_rank(std::int64_t stages, std::int64_t microbatches, bool weights,
                                        std::int64_t place) {
  constexpr std::pair<std::int64_t, std::int64_t> kPlaces[] = {{1, 0}, {2, 0}, {2, 1}, {3, 0}, {3, 1}, {3, 2}};
  const auto [ranks, rank] = kPlaces[place];
  PipelineShape shape;
  shape.ranks = ranks;
  shape.stages = stages;
  shape.microbatches = stages == 1 ? microbatches : std::max(microbatches, ranks);
  shape.delay_weight_gradients = weights;
  return pipeline_order(shape, rank);
}

}  // namespace

StepPlan plan_of_chunks(const Action& action, std::int64_t repetition) {
  Digits layout(action.a);
  ChunkPlan chunks;
  chunks.stages = 1 + layout.below(3);
  std::int64_t microbatches = 1 + layout.below(3);
  const std::int64_t shape = layout.below(6);
  const std::int64_t place = layout.below(6);
  chunks.overlap = static_cast<ChunkPlan::Overlap>(layout.below(3));
  if (layout.below(2) == 1 && repetition == 1) {
    microbatches = microbatches == 1 ? 3 : microbatches - 1;
  }
  chunks.ordered = action.kind != Kind::chunks;
  chunks.weight_steps = shape == 3 || shape == 5;
  if (shape < 2) {
    chunks.order = simple_order(chunks.stages, microbatches, shape == 1);
  } else if (shape < 4) {
    chunks.order = order_of_rank(chunks.stages, microbatches, chunks.weight_steps, place);
  } else {
    chunks.order = random_order(chunks.stages, microbatches, chunks.weight_steps, static_cast<unsigned>(action.a));
  }
  StepPlan plan;
  if (action.kind == Kind::deviate) {
    if (repetition == 1) {
      chunks.deviation = static_cast<Deviation>(1 + action.b);
    }
  } else {
    Digits uses(action.b);
    const Kind kind = kUses[uses.below(std::ssize(kUses))];
    const std::int64_t choice = uses.below(3);
    plan = plan_of({kind, choice % habit(kind).choices_a, choice % habit(kind).choices_b});
    plan.in_step = true;
    plan.crossed = false;
    plan.backward = true;
    const std::int64_t extra = uses.below(4);
    chunks.caught = extra % 2 == 1;
    if (extra >= 2) {
      chunks.first_outside = !chunks.ordered && extra == 2;
      const std::int64_t last = chunks.stages - 1;  // forwards without a backward
      const auto middle = chunks.order.begin() + std::ssize(chunks.order) / 2;
      chunks.order.insert(middle, {0, microbatches + 10, Work::forward});
      chunks.order.insert(chunks.order.begin(), {last, microbatches + 11, Work::forward});
    }
  }
  const auto forwards = std::count_if(chunks.order.begin(), chunks.order.end(),
                                      [](const PipelineStep& work) { return work.kind == Work::forward; });
  chunks.thrown_at = chunks.deviation_at = forwards / 2;
  plan.chunks = std::move(chunks);
  return plan;
}

}  // namespace sidestream::habits
