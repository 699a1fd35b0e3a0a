#pragma once
#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string_view>
#include <vector>

namespace sidestream::habits {

/// What a trainer may do next. `a` and `b` of an Action choose within it; kHabits says how many choices there are.
enum class Kind : std::uint8_t {
  train,
  other_rows,
  accumulate,
  in_flight,
  clip,
  evaluate,
  validate_between,
  inference,
  aliased_argument,
  memory,
  other_scale,
  inplace_on_output,
  leave_step,
  throw_in_body,
  keep_output,
  late_call,
  skip_block,
  repeat_block,
  unused_output,
  unused_aux,
  input_gradient,
  autocast,
  backward_after_step,
  backward_twice,
  no_grad_prefix,
  other_stream,
  other_thread,
  change_weight_before_backward,
  forward_only,
  keep_gradients,
  freeze,
  thaw,
  load,
  relocate,
  convert,
  replace_module,
  seed,
  determinism,
  default_dtype,
  part_in_eval,
  add_hook,
  remove_hook,
  reset,
  new_engine,
  second_engine,
  nested_engine,
  report,
  hook_on_output,
  some_gradients,
  gradient_penalty,
  restrided_argument,
  engine_gone,
  shared_weight,
  empty_step,
  keep_loss,
  dropout_rate,
  schedule,
  validate_pending,
  buckets,
  whole_step,
  struct_argument,
  switch_offload,
  chunks,
  order,
  deviate,
  weights,
};

struct Habit {
  Kind kind;
  const char* name;
  std::int64_t choices_a;
  std::int64_t choices_b;
  int weight;
};

/// All of them, in the order of Kind.
[[nodiscard]] const std::vector<Habit>& habits();
[[nodiscard]] const Habit& habit(Kind kind);
[[nodiscard]] std::optional<Kind> kind_named(std::string_view name);

struct Action {
  Kind kind = Kind::train;
  std::int64_t a = 0;
  std::int64_t b = 0;
};

/// What a program trains, and in which form it is wrapped.
struct Setup {
  std::vector<std::int64_t> parts;  ///< one a block: what it is made of
  std::int64_t form = 0;
};

/// A program as it stands in a file: a line for the setup, one for each action.
struct ProgramText {
  Setup setup;
  std::vector<Action> actions;
};

std::ostream& operator<<(std::ostream& out, const Action& action);
std::ostream& operator<<(std::ostream& out, const Setup& setup);
/// Throws: std::runtime_error that names the line.
[[nodiscard]] ProgramText read_program(std::istream& in);

}  // namespace sidestream::habits
