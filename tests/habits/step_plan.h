#pragma once
#include <cstdint>
#include <optional>

#include "habits/action.h"
#include "habits/chunk_plan.h"

namespace sidestream::habits {

/// How one step of a trainer goes. -1: no block.
struct StepPlan {
  enum class Context : std::uint8_t { data, same_tensor, memory };
  enum class Grad : std::uint8_t { on, off_in_step, off_around_step, inference };
  enum class Autocast : std::uint8_t { off, on, without_cache };

  std::int64_t rows = 4;
  std::int64_t microbatches = 1;
  bool in_flight = false;
  bool backward_in_forward_order = false;
  bool training = true;
  Grad grad = Grad::on;
  bool in_step = true;
  Context context = Context::data;
  double scale = 1;
  std::int64_t inplace_on_output = -1;
  std::int64_t leave_at = -1;  ///< before block n; behind the last one, and behind backward
  std::int64_t throw_in_body = -1;
  std::int64_t keep_output = -1;
  bool late_call = false;
  std::int64_t skip = -1;
  std::int64_t repeat = -1;
  std::int64_t unused_output = -1;
  bool use_aux = true;
  bool input_gradient = false;
  Autocast autocast = Autocast::off;
  bool clip = false;
  bool validate_first = false;
  bool backward = true;
  bool backward_after_step = false;
  bool backward_twice = false;
  bool no_grad_prefix = false;
  bool other_stream = false;
  bool other_thread = false;
  std::int64_t change_weight = -1;  ///< of this block, between forward and backward
  bool keep_gradients = false;
  bool zero_in_place = false;
  bool nested = false;   ///< a step of the second engine between forward and backward
  bool crossed = false;  ///< which begins inside of this one, and ends behind it
  bool teach = false;    ///< the second model runs inside the step, without gradients
  std::int64_t hook_on_output = -1;
  bool some_gradients = false;    ///< of the stem alone, by autograd::grad, in the place of backward
  bool gradient_penalty = false;  ///< a backward through a gradient
  std::int64_t restride =
      -1;  ///< 0: what a block is given lies in memory otherwise; 1: it is the transposed view of an output
  bool engine_gone = false;         ///< before backward; a new one afterwards
  std::int64_t shared_weight = -1;  ///< the head reads a weight of this block too
  bool validate_pending = false;    ///< the model runs without gradients between forward and backward
  bool pending_in_eval = false;     ///< that in eval mode
  std::int64_t pending_rows = 4;
  std::int64_t buckets = -1;     ///< how the callables of several shapes are trained
  std::int64_t whole_step = -1;  ///< how the step that is one graph goes
  bool inside = false;           ///< they are trained between forward and backward of this step; else in its place
  bool empty = false;
  bool keep_loss = false;           ///< with its graph, until the next step has ended
  bool as_struct = false;           ///< blocks get their other arguments as a pointer to a struct
  std::optional<ChunkPlan> chunks;  ///< the microbatches are chunks
  std::int64_t data = 0;            ///< which

  [[nodiscard]] bool deviates() const { return chunks && chunks->deviation != Deviation::none; }
};

/// Of an action that is one step; a plain one for all others.
[[nodiscard]] StepPlan plan_of(const Action& action);

}  // namespace sidestream::habits
