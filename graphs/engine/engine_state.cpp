#include "graphs/engine/engine_state.h"

#include <exception>
#include <string>
#include <thread>
#include <utility>

#include <c10/util/ScopeExit.h>
#include <torch/nn/module.h>

#include "graphs/engine/graph_drawing.h"
#include "offload/kept_failure.h"
#include "offload/name_pattern.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// How many slots the chunks of a step with an order may have, each with captures of its own: see StepChunks. None if the memory of the
/// calls is not free when their backward ends.
std::size_t most_slots(const Options& options) {
  const GraphOptions& graphs = options.graph_options();
  return graphs.retain_graph_in_backward() ? 0 : static_cast<std::size_t>(options.call_options().max_captures());
}

}  // namespace

/// The parts of a step's end. If one part fails, the rest are still released.
class PartsOfEnd {
 public:
  explicit PartsOfEnd(bool failed) noexcept : failed_(failed) {}

  template <class Part>
  void attempt(const Part& part) {
    try {
      part();
    } catch (...) {
      failed_ = true;
      error_ = error_ == nullptr ? std::current_exception() : error_;
    }
  }
  [[nodiscard]] bool failed() const noexcept { return failed_; }
  /// Throws what failed first, if a part did.
  void rethrow() const {
    if (error_ != nullptr) {
      std::rethrow_exception(error_);
    }
  }

 private:
  bool failed_;
  std::exception_ptr error_;
};

EngineState::EngineState(torch::nn::Module& model, Options options, std::shared_ptr<Runtime> runtime)
    : model_(model.weak_from_this().lock()),
      resources_(model, std::move(options), std::move(runtime)),
      context_(*this),
      calls_(model, resources_.tree, resources_.graphed, CallRules::of(resources_.options.call_options())),
      recorded_(model, resources_.runtime->device(), resources_.rest,
                delays_gradients(resources_.options.graph_options())),
      sequences_(resources_, context_, eager_plan_, counts_),
      budget_(resources_, sequences_),
      chunks_(resources_.mover, resources_.eager, most_slots(resources_.options)),
      verification_(resources_.options.verify_replays() > 0
                        ? std::make_unique<ReplayVerification>(resources_.options, model, context_)
                        : nullptr),
      dispatcher_(resources_, context_, eager_plan_, recorded_, sequences_, counts_, chunks_, verification_.get()),
      memory_(resources_.runtime) {}

void EngineState::check_thread_of_step() const {
  if (step_->thread() != std::this_thread::get_id()) {
    throw UsageError("a step was ended on another thread than the one it began on; end it on the thread that began it");
  }
}

void EngineState::close_step(bool failed) noexcept {
  try {
    try {
      check_thread_of_step();
    } catch (...) {
      const std::lock_guard lock(kept_);
      step_was_abandoned_ = true;
      failed = false;
      throw;
    }
    end_step(failed);
  } catch (...) {
    if (failed) {
      return;  // the exception on its way says more
    }
    log_failure(std::current_exception(), "thrown by the engine's next step()");
    const std::lock_guard lock(kept_);
    kept_failure_ = std::current_exception();
  }
}

void EngineState::end_abandoned_step() {
  const std::lock_guard lock(kept_);
  if (std::exchange(step_was_abandoned_, false)) {
    try {
      end_step(/*failed=*/true);
    } catch (...) {  // what was kept says more
    }
  }
}

void EngineState::throw_kept() {
  const std::lock_guard lock(kept_);
  if (kept_failure_ != nullptr) {
    std::rethrow_exception(std::exchange(kept_failure_, nullptr));
  }
}

void EngineState::refuse_inside(const char* what) const {
  if (making_ready_ || context_.phase() == CallContext::Phase::capturing) {
    throw UsageError(std::string(what) +
                     " was called inside a capture of the same engine (from a hook, from Options::progress, or from " +
                     "the body of a call); call it before or after the capture");
  }
}

std::vector<std::string> EngineState::write_graphs(const std::string& folder) const {
  refuse_inside("OffloadEngine::write_graphs");
  return write_graph_files(*resources_.runtime, sequences_, folder);
}

std::string EngineState::trace_json() const {
  refuse_inside("OffloadEngine::trace_json");
  const TracedStep& step = resources_.mover->trace().step();
  if (step.number == 0) {
    throw UsageError(
        "OffloadEngine::trace_json: no step has been traced; the second step after the latest captures is, so run more "
        "steps first. A GraphedStep is traced only if it is called inside of OffloadEngine::step");
  }
  return chrome_trace(step);
}

Chunk EngineState::begin_chunk(const std::shared_ptr<EngineState>& self, const ChunkId& id) {
  self->refuse_outside_of_step("OffloadEngine::chunk");
  return Chunk(self, self->chunks_.begin(id));
}

void EngineState::begin_step(const std::vector<PipelineStep>* order) {
  refuse_inside("OffloadEngine::step");
  end_abandoned_step();
  throw_kept();
  if (step_) {
    throw UsageError("a step of this engine is active already; end it before the next begins");
  }
  chunks_.begin_step(order);
  if (std::exchange(failed_, false)) {
    sequences_.await_failed_backward();
    (void)resources_.delayed_weights->drop_all();  // of backwards that ended after the step
  }
  calls_.begin_step();
  resources_.exclusions.refresh_parameters();
  resources_.check.begin_step(counts_.steps());
  if (eager_plan_.state() != EagerPlan::State::unsized) {
    making_ready_ = true;
    try {
      make_ready();
    } catch (...) {
      making_ready_ = false;
      throw;
    }
    making_ready_ = false;
    memory_.begin(counts_.captures());
  }
  step_.emplace(resources_, context_, eager_plan_, recorded_, counts_);
  try {
    if (pins_) {
      resources_.arena->open();
    }
    chunks_.step_begun();
    if (step_->kind() == StepSession::Kind::planned) {
      resources_.mover->trace().step_begins(counts_.captures(), budget_.step_begins(counts_.captures()));
    }
    if (verification_ != nullptr) {
      verification_->begin_step();
    }
  } catch (...) {
    close_step(/*failed=*/true);  // the caller gets no Step that would
    throw;
  }
}

void EngineState::copied_in_graph(const CopyCounts& copies) noexcept {
  if (step_) {
    resources_.mover->count_launched(copies);
  } else {
    counts_.copied(copies);
  }
}

void EngineState::make_ready() {
  calls_.check_patterns();
  const bool outdated = sequences_.outdated();
  if (sequences_.agree(!recorded_.empty() || outdated || budget_.due())) {
    if (outdated) {
      sequences_.follow_weights(calls_);
    }
    if (budget_.due()) {
      budget_.make(counts_.captures());
    }
    sequences_.drop_least_used(calls_, recorded_);
    sequences_.capture_recorded(recorded_);
  }
  eager_plan_.make(*resources_.arena, resources_.exclusions, resources_.options.progress());
  resources_.eager->set_window(eager_plan_.window());
}

void EngineState::end_step(bool failed) {
  const auto ended = c10::make_scope_exit([this] { step_.reset(); });
  failed_ = failed;
  StepSession& step = *step_;
  step.leave_thread();
  context_.leave_graphed_call();
  if (verification_ != nullptr) {
    verification_->end_step();
  }
  PartsOfEnd parts(failed);
  if (failed) {
    chunks_.abandon_step();
  } else {
    parts.attempt([&] { step.finish_recording(); });
    parts.attempt([&] { chunks_.end_step(); });
  }
  parts.attempt([&] { refuse_missing_weights(failed); });
  parts.attempt([&] { step.end_copies(); });
  StepTrace::Span traced;
  parts.attempt([&] {
    traced.begin(resources_.mover->trace(), SpanKind::wait, resources_.runtime->current_stream(), "(end of the step)");
  });
  counts_.replayed(join_sequences(parts));
  parts.attempt([&] { traced.end(); });
  const CopyCounts copies = resources_.mover->take_counts();
  step.stop_sizing();
  if (parts.failed()) {
    memory_.abandon();
    resources_.mover->trace().step_failed();
    step.shortage().warn(sequences_.all(), step.recorder());
    recorded_.clear();
    if (std::exchange(pins_, step.kind() == StepSession::Kind::planned && step.recorder().counts().refused_bytes > 0)) {
      resources_.arena->seal();
    }
    parts.rethrow();
    return;
  }
  take_results(step, copies);
}

void EngineState::mark_not_offload(const at::Tensor& tensor) {
  if (step_ && step_->thread() == std::this_thread::get_id()) {
    step_->mark_not_offload(tensor);  // the step may have saved it already
  } else {
    resources_.exclusions.mark(tensor);
  }
}

void EngineState::refuse_in_call(const char* what) const {
  refuse_inside(what);
  if (context_.phase() == CallContext::Phase::inside_graphed_call) {
    throw UsageError(std::string(what) +
                     " was called inside of a graphed call, and replays would not run it; call it around the call");
  }
  if (step_ && step_->thread() != std::this_thread::get_id()) {
    throw UsageError(std::string(what) + " was called on another thread than the step's; call it where the step began");
  }
}

void EngineState::refuse_outside_of_step(const char* what) const {
  refuse_in_call(what);
  if (!step_) {
    throw UsageError(std::string(what) +
                     " was called outside of a step; begin the step first, and keep it until the end");
  }
}

void EngineState::backward_dw() {
  refuse_in_call("OffloadEngine::backward_dw");
  resources_.delayed_weights->compute_all();
  recorded_.weights_computed();
}

void EngineState::backward_dw(const ChunkId& id) {
  refuse_outside_of_step("OffloadEngine::backward_dw");
  RunningChunk& chunk = chunks_.chunk_for_weights(id);
  const auto is_of_chunk = [&chunk](const GraphSequence& sequence, std::size_t call) {
    return sequence.captured().calls[call].replay.chunk == chunk.number;
  };
  const auto refuse = [&id](const std::string& call) {
    throw UsageError("OffloadEngine::backward_dw: the backward of " + call + " in stage " + std::to_string(id.stage) +
                     ", microbatch " + std::to_string(id.microbatch) +
                     " has not run; call it after the backward of the chunk");
  };
  sequences_.for_each([&](const GraphSequence& sequence) {
    for (std::size_t call = 0; call < sequence.captured().calls.size() && sequence.pending().any(); ++call) {
      if (is_of_chunk(sequence, call) && sequence.pending().runs().contains(call)) {
        refuse(sequence.captured().describe(call));
      }
    }
  });
  if (const RecordedCall* const call = recorded_.awaiting_backward(chunk.number)) {
    refuse(describe(*call->site));
  }
  while (resources_.delayed_weights->compute_next(is_of_chunk)) {
  }
  chunk.weights_computed = true;
  recorded_.weights_computed(chunk.number);
}

void EngineState::refuse_missing_weights(bool failed) {
  const std::string missing = resources_.delayed_weights->drop_all();
  if (!failed && !missing.empty()) {
    throw UsageError("the step ended, but the weight gradients of graphed call \"" + missing +
                     "\" are delayed and were not computed. They are lost; call backward_dw of the engine or of the "
                     "callable after each backward, before the step ends");
  }
}

GraphSequence::Counts EngineState::join_sequences(PartsOfEnd& parts) {
  GraphSequence::Counts total;
  sequences_.for_each([&](GraphSequence& sequence) {
    parts.attempt([&] { sequence.join_copies(); });
    total += sequence.take_counts();
  });
  return total;
}

void EngineState::take_results(StepSession& step, const CopyCounts& copies) {
  switch (step.kind()) {
    case StepSession::Kind::sizing:
      counts_.step_ended(step.recorder(), copies, step.sizing_peak().peak());
      counts_.sizing_ended(step.recorder(), step.sizing_peak().without_offload());
      counts_.small_storages(step.recorder().small_bytes());
      eager_plan_.learn(step.recorder(), resources_.eager->events(), resources_.eager->limits());
      break;
    case StepSession::Kind::planned:
      end_trace();
      counts_.step_ended(step.recorder(), copies, memory_.end());
      if (std::exchange(pins_, false) || step.recorder().counts().refused_bytes > 0) {
        eager_plan_.learn(step.recorder(), resources_.eager->events(), resources_.eager->limits());
      }
      break;
  }
  chunks_.report(counts_.chunks());
  counts_.count_step();
}

void EngineState::end_trace() {
  const bool traced =
      resources_.mover->trace().step_ended(counts_.steps() + 1, [&](std::uint64_t number, TracedSpan& span) {
        if (const RunningChunk* const chunk = chunks_.find(number)) {
          span.stage = chunk->id.stage;
          span.microbatch = chunk->id.microbatch;
        }
      });
  if (traced) {
    budget_.step_traced();
  }
}

void EngineState::refuse_inside_step(const std::string& what) {
  refuse_inside(what.c_str());
  end_abandoned_step();
  if (step_) {
    throw UsageError(what + " was called inside a step; end the step first");
  }
}

void EngineState::reset() {
  refuse_inside_step("OffloadEngine::reset");
  forget_captures();
}

void EngineState::set_activation_offloading(const std::vector<NamePatterns>& named, bool on) {
  refuse_inside_step("OffloadEngine::set_activation_offloading");
  if (counts_.steps() > 0) {
    for (const NamePatterns& each : named) {
      resources_.tree.require_known(each);
    }
  }
  bool changes = false;
  for (const NamePatterns& each : named) {
    changes = resources_.tree.switch_offload(each, on) || changes;
  }
  if (changes) {
    sequences_.offload_switched();
    forget_captures();
  }
}

void EngineState::forget_captures() {
  sequences_.drop_own();
  calls_.drop_variants();
  recorded_.clear();
  eager_plan_.drop();
  resources_.arena->trim();
  sequences_.mark_static_outputs();
  budget_.drop();
  resources_.mover->trace().begin_anew();
}

}  // namespace sidestream
