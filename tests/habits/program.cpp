#include "habits/program.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <exception>
#include <iterator>
#include <ostream>
#include <sstream>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <c10/core/DefaultDtype.h>
#include <torch/utils.h>

#include "sidestream/device.h"
#include "sidestream/error.h"
#include "sidestream/testing/simulator.h"

namespace sidestream::habits {
namespace {

/// Both sides see the same switches; a program leaves them as it found them.
void set_switches(bool deterministic, bool double_by_default) {
  at::globalContext().setDeterministicAlgorithms(deterministic, /*warn_only=*/false);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
  c10::set_default_dtype(caffe2::TypeMeta::fromScalarType(double_by_default ? at::kDouble : at::kFloat));
}

constexpr const char* kSchedules[] = {"late", "early", "d2h-early", "d2h-late", "seed:1", "seed:2"};

/// A GPU has its own.
void order_by(c10::Device device, const Schedule& schedule) {
  if (!device.is_cuda()) {
    set_schedule(device, schedule);
  }
}

at::Generator generator_of(c10::Device device) { return at::globalContext().defaultGenerator(device); }

/// The message without what changes from program to program.
std::string kind_of(const std::string& message) {
  std::string text;
  for (const char c : message.substr(0, message.find('\n'))) {
    if (std::isdigit(static_cast<unsigned char>(c)) == 0) {
      text += c;
    } else if (text.empty() || text.back() != 'N') {
      text += 'N';
    }
  }
  return text.substr(0, 160);
}

bool same_bytes(const at::Tensor& mine, const at::Tensor& plain) {
  if (mine.defined() != plain.defined()) {
    return false;
  }
  if (!mine.defined()) {
    return true;
  }
  if (mine.sizes() != plain.sizes() || mine.dtype() != plain.dtype() || mine.device() != plain.device()) {
    return false;
  }
  const at::Tensor a = mine.detach().cpu().contiguous();
  const at::Tensor b = plain.detach().cpu().contiguous();
  return std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

std::string first_difference(const at::Tensor& mine, const at::Tensor& plain) {
  std::ostringstream text;
  if (mine.defined() != plain.defined()) {
    return mine.defined() ? "is there, plain training has none" : "is missing, plain training has one";
  }
  if (mine.sizes() != plain.sizes() || mine.dtype() != plain.dtype() || mine.device() != plain.device()) {
    text << "is " << mine.toString() << mine.sizes() << mine.device() << ", plain training's " << plain.toString()
         << plain.sizes() << plain.device();
    return text.str();
  }
  const at::Tensor a = mine.detach().cpu().contiguous().to(at::kDouble).flatten();
  const at::Tensor b = plain.detach().cpu().contiguous().to(at::kDouble).flatten();
  text.precision(9);
  for (std::int64_t i = 0; i < a.numel(); ++i) {
    const auto x = a[i].item<double>();
    const auto y = b[i].item<double>();
    if (!(x == y)) {
      text << "is " << x << " at " << i << ", plain training's " << y;
      break;
    }
  }
  return text.str();
}

}  // namespace

Program::Program(const Setup& setup, c10::Device device, std::ostream& log, Statistics& statistics)
    : device_(device), log_(log), statistics_(statistics) {
  set_switches(false, false);
  log_ << setup << std::endl;
  statistics_.add("programs");
  torch::manual_seed(3);
  mine_.emplace(setup, device, /*with_engine=*/true);
  if (mine_->form().max_captures > 0) {
    bound_warnings_.emplace();
  }
  torch::manual_seed(3);
  plain_.emplace(setup, device, /*with_engine=*/false);
  mine_->random = generator_of(device).get_state();
  plain_->random = mine_->random.clone();
}

Program::~Program() {
  set_switches(false, false);
  order_by(device_, Schedule());
}

template <class Run>
Program::Outcome Program::attempt(Trainer& side, const Run& run) {
  at::Generator generator = generator_of(device_);
  generator.set_state(side.random);
  Outcome outcome;
  try {
    run(side);
  } catch (const Left&) {
    outcome.kind = Outcome::Kind::left;
  } catch (const Error& error) {
    outcome = {Outcome::Kind::refused, error.what()};
  } catch (const std::exception& error) {
    const std::string text = error.what();
    outcome = {Outcome::Kind::error, text.substr(0, text.find('\n'))};
  }
  synchronize(device_);
  side.random = generator.get_state();
  return outcome;
}

void Program::perform(const Action& action) {
  log_ << action << std::endl;
  count(action);
  switch (action.kind) {
    case Kind::freeze:
    case Kind::thaw:
    case Kind::load:
    case Kind::relocate:
    case Kind::replace_module:
    case Kind::part_in_eval:
    case Kind::add_hook:
    case Kind::remove_hook:
    case Kind::reset:
    case Kind::new_engine:
    case Kind::report:
    case Kind::switch_offload:
    case Kind::dropout_rate:
    case Kind::weights:
      change(action);
      break;
    case Kind::convert:
      change({Kind::convert, action.a, 0});
      if (action.a == 1) {
        step(action, {});
      }
      change({Kind::convert, action.a, 1});
      break;
    case Kind::seed:
      generator_of(device_).set_current_seed(40 + static_cast<std::uint64_t>(++changes_));
      mine_->random = generator_of(device_).get_state();
      plain_->random = mine_->random.clone();
      break;
    case Kind::determinism:
      set_switches(action.a == 0, c10::get_default_dtype() == caffe2::TypeMeta::fromScalarType(at::kDouble));
      break;
    case Kind::default_dtype:
      set_switches(at::globalContext().deterministicAlgorithms(), action.a == 0);
      break;
    case Kind::schedule:
      order_by(device_, Schedule::parse(kSchedules[static_cast<std::size_t>(action.a) % std::size(kSchedules)]));
      break;
    case Kind::second_engine:
      mine_->second();
      plain_->second();
      step(action, {});
      break;
    case Kind::chunks:
    case Kind::order:
    case Kind::deviate:
      for (std::int64_t repetition = 0; repetition < 3; ++repetition) {
        step(action, plan_of_chunks(action, repetition));
      }
      break;
    default:
      step(action, plan_of(action));
      break;
  }
}

void Program::step(const Action& action, StepPlan plan) {
  plan.data = ++data_;
  const bool of_second = action.kind == Kind::second_engine;
  const auto run = [&](Trainer& side) { (of_second ? side.second() : side).step(plan); };
  const std::int64_t eager_before = mine_->eager_calls();
  const Outcome mine = attempt(*mine_, run);
  if (mine.kind == Outcome::Kind::left && !mine_->began()) {
    compare(action);  // the user's code threw while it was captured: nothing has changed
    return;
  }
  if (plan.throw_in_body >= 0 && mine.kind == Outcome::Kind::done && !mine_->caught()) {
    plan.throw_in_body = -1;  // it replayed
  }
  plain_->follow(*mine_);
  settle(action, mine, attempt(*plain_, run));
  const auto calls = mine_->take_calls();
  std::int64_t expected = 0;
  for (std::size_t i = 0; i < kCallClasses; ++i) {
    const auto call = static_cast<CallClass>(i);
    statistics_.add(std::string("calls ") + name_of(call), calls[i]);
    expected += call == CallClass::known ? 0 : calls[i];
  }
  const CapturedCalls buckets = mine_->take_bucket_calls();
  statistics_ += mine_->take_seen();
  statistics_ += plain_->take_seen();
  statistics_.add("bucketed calls replayed", buckets.replayed);
  statistics_.add("bucketed calls run", buckets.ran);
  const CapturedCalls whole_steps = mine_->take_whole_steps();
  statistics_.add("whole steps replayed", whole_steps.replayed);
  statistics_.add("whole steps run", whole_steps.ran);
  if (mine.kind == Outcome::Kind::done && plan.in_step && plan.grad != StepPlan::Grad::on) {
    statistics_.add("replays without gradients", mine_->engine()->report().replays);
  }
  if (mine.kind == Outcome::Kind::done && !of_second) {
    const std::int64_t known = calls[static_cast<std::size_t>(CallClass::known)];
    const std::int64_t eager = std::max<std::int64_t>(0, mine_->eager_calls() - eager_before - expected);
    statistics_.add("replayed", known - std::min(known, eager));
    statistics_.add("not replayed", std::min(known, eager));
    if (eager > 0) {
      statistics_.add(std::string("eager in ") + habit(action.kind).name, eager);
    }
    statistics_.add("offloaded bytes", mine_->engine()->report().offloaded_bytes);
  }
}

void Program::change(const Action& action) {
  const auto run = [&](Trainer& side) { side.change(action); };
  const Outcome mine = attempt(*mine_, run);
  settle(action, mine, attempt(*plain_, run));
}

void Program::settle(const Action& action, const Outcome& mine, const Outcome& plain) {
  const auto differ = [&](const std::string& what) {
    std::ostringstream text;
    text << action << ": " << what;
    throw Difference(text.str());
  };
  if (mine.kind == Outcome::Kind::error && plain.kind != Outcome::Kind::error) {
    differ("an error that is no sidestream::Error: " + mine.message);
  }
  if (mine.kind == Outcome::Kind::refused && action.b == 0 &&
      (action.kind == Kind::buckets || action.kind == Kind::whole_step)) {
    differ("refused, though nothing else was pending: " + mine.message);
  }
  if (mine.kind == Outcome::Kind::refused && mine.message.find("name pattern") == std::string::npos &&
      mine.message.find("gradient hooks") == std::string::npos &&
      (action.kind == Kind::chunks || action.kind == Kind::order || action.kind == Kind::deviate)) {
    differ("refused, though the steps of chunks do nothing wrong: " + mine.message);
  }
  if (mine.kind == Outcome::Kind::refused && action.kind == Kind::validate_pending &&
      mine.message.find("another capture in the same memory") != std::string::npos) {
    differ("a call beside a pending one took its memory: " + mine.message);
  }
  if (plain.kind == Outcome::Kind::error && mine.kind != Outcome::Kind::error && mine.kind != Outcome::Kind::refused) {
    differ("plain training throws: " + plain.message);
  }
  if (mine.kind != Outcome::Kind::refused && plain.kind != Outcome::Kind::error && mine.kind != plain.kind) {
    differ(mine.kind == Outcome::Kind::left ? "the user's exception came here alone" : "the user's exception was lost");
  }
  if (mine.kind == Outcome::Kind::done && plain.kind == Outcome::Kind::done &&
      mine_->missed_weights() != plain_->missed_weights()) {
    differ(mine_->missed_weights() ? "weight gradients are said to be missing, and all were computed"
                                   : "the step ended, and nothing said that weight gradients are missing");
  }
  if (mine.kind == plain.kind && mine.kind != Outcome::Kind::error) {
    compare(action);
    return;
  }
  if (plain.kind == Outcome::Kind::error) {
    statistics_.add("agreed errors");
  } else {
    statistics_.add("refused " + std::string(habit(action.kind).name) + ": " + kind_of(mine.message));
  }
  mine_->become(*plain_);
  plain_->forget_inputs();
  synchronize(device_);
}

void Program::compare(const Action& action) const {
  const auto mine = mine_->state();
  const auto plain = plain_->state();
  std::ostringstream text;
  text << action << ": ";
  if (mine.size() != plain.size()) {
    text << mine.size() << " tensors, plain training has " << plain.size();
    throw Difference(text.str());
  }
  for (std::size_t i = 0; i < mine.size(); ++i) {
    if (mine_->form().accumulate && !plain[i].second.defined() && mine[i].second.defined() &&
        at::count_nonzero(mine[i].second.cpu()).item<std::int64_t>() == 0) {
      continue;  // graphs that own the gradients make them when they are captured
    }
    if (mine[i].first != plain[i].first || !same_bytes(mine[i].second, plain[i].second)) {
      text << mine[i].first << ' ' << first_difference(mine[i].second, plain[i].second);
      throw Difference(text.str());
    }
  }
}

void Program::count(const Action& action) {
  statistics_.add("actions");
  statistics_.add(std::string("action ") + habit(action.kind).name);
  for (const Kind earlier : earlier_) {
    statistics_.add(std::string("pair ") + habit(earlier).name + ' ' + habit(action.kind).name);
  }
  earlier_.insert(action.kind);
}

}  // namespace sidestream::habits
