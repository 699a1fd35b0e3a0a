#include "habits/action.h"

#include <istream>
#include <ostream>
#include <sstream>
#include <stdexcept>

#include "habits/chunk_plan.h"

namespace sidestream::habits {

const std::vector<Habit>& habits() {
  static const std::vector<Habit> all = {
      {Kind::train, "train", 1, 1, 30},
      {Kind::other_rows, "other_rows", 2, 1, 3},
      {Kind::accumulate, "accumulate", 2, 1, 3},
      {Kind::in_flight, "in_flight", 2, 2, 3},
      {Kind::clip, "clip", 1, 1, 2},
      {Kind::evaluate, "evaluate", 3, 2, 3},
      {Kind::validate_between, "validate_between", 2, 2, 2},
      {Kind::inference, "inference", 2, 1, 2},
      {Kind::aliased_argument, "aliased_argument", 1, 1, 2},
      {Kind::memory, "memory", 1, 1, 2},
      {Kind::other_scale, "other_scale", 2, 1, 2},
      {Kind::inplace_on_output, "inplace_on_output", 3, 1, 2},
      {Kind::leave_step, "leave_step", 6, 1, 2},
      {Kind::throw_in_body, "throw_in_body", 3, 1, 2},
      {Kind::keep_output, "keep_output", 3, 1, 3},
      {Kind::late_call, "late_call", 1, 1, 2},
      {Kind::skip_block, "skip_block", 3, 1, 2},
      {Kind::repeat_block, "repeat_block", 3, 1, 2},
      {Kind::unused_output, "unused_output", 3, 1, 2},
      {Kind::unused_aux, "unused_aux", 1, 1, 2},
      {Kind::input_gradient, "input_gradient", 1, 1, 2},
      {Kind::autocast, "autocast", 2, 1, 2},
      {Kind::backward_after_step, "backward_after_step", 1, 1, 2},
      {Kind::backward_twice, "backward_twice", 1, 1, 1},
      {Kind::no_grad_prefix, "no_grad_prefix", 1, 1, 2},
      {Kind::other_stream, "other_stream", 1, 1, 2},
      {Kind::other_thread, "other_thread", 1, 1, 2},
      {Kind::change_weight_before_backward, "change_weight_before_backward", 3, 1, 2},
      {Kind::forward_only, "forward_only", 1, 1, 2},
      {Kind::keep_gradients, "keep_gradients", 2, 1, 2},
      {Kind::freeze, "freeze", 3, 3, 3},
      {Kind::thaw, "thaw", 1, 1, 3},
      {Kind::load, "load", 2, 1, 2},
      {Kind::relocate, "relocate", 3, 1, 2},
      {Kind::convert, "convert", 3, 1, 2},
      {Kind::replace_module, "replace_module", 3, 1, 2},
      {Kind::seed, "seed", 1, 1, 2},
      {Kind::determinism, "determinism", 2, 1, 2},
      {Kind::default_dtype, "default_dtype", 2, 1, 2},
      {Kind::part_in_eval, "part_in_eval", 4, 1, 2},
      {Kind::add_hook, "add_hook", 3, 2, 2},
      {Kind::remove_hook, "remove_hook", 1, 1, 2},
      {Kind::reset, "reset", 1, 1, 1},
      {Kind::new_engine, "new_engine", 1, 1, 1},
      {Kind::second_engine, "second_engine", 1, 1, 2},
      {Kind::nested_engine, "nested_engine", 3, 1, 2},
      {Kind::report, "report", 1, 1, 1},
      {Kind::hook_on_output, "hook_on_output", 3, 1, 2},
      {Kind::some_gradients, "some_gradients", 2, 1, 2},
      {Kind::gradient_penalty, "gradient_penalty", 1, 1, 1},
      {Kind::restrided_argument, "restrided_argument", 2, 1, 2},
      {Kind::engine_gone, "engine_gone", 1, 1, 1},
      {Kind::shared_weight, "shared_weight", 3, 1, 2},
      {Kind::empty_step, "empty_step", 1, 1, 1},
      {Kind::keep_loss, "keep_loss", 1, 1, 2},
      {Kind::dropout_rate, "dropout_rate", 3, 1, 2},
      {Kind::schedule, "schedule", 6, 1, 2},
      {Kind::validate_pending, "validate_pending", 2, 2, 2},
      {Kind::buckets, "buckets", 4, 2, 2},
      {Kind::whole_step, "whole_step", 5, 2, 2},
      {Kind::struct_argument, "struct_argument", 2, 1, 2},
      {Kind::switch_offload, "switch_offload", 3, 2, 1},
      {Kind::chunks, "chunks", kChunkLayouts, kChunkUses, 3},
      {Kind::order, "order", kChunkLayouts, kChunkUses, 3},
      {Kind::deviate, "deviate", kChunkLayouts, kDeviations, 1},
      {Kind::weights, "weights", kWeightTimes + 1, 1, 2},
  };
  return all;
}

const Habit& habit(Kind kind) { return habits()[static_cast<std::size_t>(kind)]; }

std::optional<Kind> kind_named(std::string_view name) {
  for (const Habit& each : habits()) {
    if (name == each.name) {
      return each.kind;
    }
  }
  return std::nullopt;
}

std::ostream& operator<<(std::ostream& out, const Action& action) {
  return out << habit(action.kind).name << ' ' << action.a << ' ' << action.b;
}

std::ostream& operator<<(std::ostream& out, const Setup& setup) {
  out << "setup " << setup.form;
  for (const std::int64_t part : setup.parts) {
    out << ' ' << part;
  }
  return out;
}

ProgramText read_program(std::istream& in) {
  ProgramText program;
  std::string line;
  while (std::getline(in, line)) {
    if (line.empty() || line[0] == '#') {
      continue;
    }
    std::istringstream words(line);
    std::string name;
    words >> name;
    if (name == "setup") {
      words >> program.setup.form;
      for (std::int64_t part = 0; words >> part;) {
        program.setup.parts.push_back(part);
      }
      continue;
    }
    const auto kind = kind_named(name);
    Action action;
    if (!kind || !(words >> action.a >> action.b)) {
      throw std::runtime_error("no action: " + line);
    }
    action.kind = *kind;
    program.actions.push_back(action);
  }
  if (program.setup.parts.empty()) {
    throw std::runtime_error("the program has no line \"setup FORM PART...\"");
  }
  return program;
}

}  // namespace sidestream::habits
