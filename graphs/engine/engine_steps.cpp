// The begin and the end of a step.
#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <c10/util/ScopeExit.h>

#include "graphs/engine/engine_state.h"
#include "offload/kept_failure.h"
#include "runtime/live_memory.h"
#include "sidestream/error.h"

namespace sidestream {

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

void EngineState::begin_step(const std::vector<PipelineStep>* order) {
  refuse_inside("OffloadEngine::step");
  end_abandoned_step();
  throw_kept();
  if (step_) {
    throw UsageError("a step of this engine is active already; end it before the next begins");
  }
  if (context_.in_call()) {
    throw UsageError("OffloadEngine::step was called inside of a call; begin the step before the call");
  }
  chunks_.begin_step(order);
  if (std::exchange(failed_, false)) {
    sequences_.await_failed_backward();
    resources_.delayed_weights->drop_all();  // of backwards that ended after the step
  }
  calls_.begin_step();
  const bool sizes = eager_plan_.state() == EagerPlan::State::unsized;
  if (sizes) {
    resources_.learn_registered();  // modules may have been replaced before OffloadEngine::reset
  } else {
    resources_.exclusions.refresh_parameters();
  }
  resources_.check.begin_step(counts_.report.steps);
  if (sizes) {
    lasting_before_sizing_ = lasting_bytes();
  } else {
    if (const auto before = std::exchange(lasting_before_sizing_, std::nullopt)) {
      counts_.report.sizing_peak_bytes += lasting_bytes() - *before;
    }
    making_ready_ = true;
    try {
      make_ready();
    } catch (...) {
      making_ready_ = false;
      throw;
    }
    making_ready_ = false;
    memory_.begin(counts_.report.captures);
  }
  step_.emplace(resources_, context_, eager_plan_, recorded_, counts_);
  try {
    if (pins_) {
      resources_.arena->open();
    }
    chunks_.step_begun();
    if (step_->kind() == StepSession::Kind::planned) {
      resources_.mover->trace().step_begins(counts_.report.captures, budget_.step_begins(counts_.report.captures));
    }
    if (verification_ != nullptr) {
      verification_->begin_step();
    }
  } catch (...) {
    close_step(/*failed=*/true);  // the caller gets no Step that would
    throw;
  }
}

std::int64_t EngineState::lasting_bytes() const {
  Runtime& runtime = *resources_.runtime;
  return LiveMemory::of(runtime.device()).use(runtime).live + resources_.exclusions.gradient_bytes() -
         static_cast<std::int64_t>(recorded_.kept_bytes());
}

void EngineState::make_ready() {
  calls_.check_patterns();
  const bool outdated = sequences_.outdated();
  if (sequences_.agree(!recorded_.empty() || outdated || budget_.due())) {
    if (outdated) {
      sequences_.follow_weights(calls_);
    }
    if (budget_.due()) {
      budget_.make(counts_.report.captures);
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

void EngineState::refuse_missing_weights(bool failed) {
  if (failed) {
    resources_.delayed_weights->drop_all();
    return;
  }
  if (const std::string missing = resources_.delayed_weights->drop_ended(); !missing.empty()) {
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
      counts_.small_bytes = static_cast<std::int64_t>(step.recorder().small_bytes());
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
  chunks_.report(counts_.report.chunks);
  ++counts_.report.steps;
}

void EngineState::end_trace() {
  const bool traced =
      resources_.mover->trace().step_ended(counts_.report.steps + 1, [&](std::uint64_t number, TracedSpan& span) {
        if (const RunningChunk* const chunk = chunks_.find(number)) {
          span.stage = chunk->id.stage;
          span.microbatch = chunk->id.microbatch;
        }
      });
  if (traced) {
    budget_.step_traced();
  }
}

void EngineState::check_end_of_step() const {
  if (step_->thread() != std::this_thread::get_id()) {
    throw UsageError("a step was ended on another thread than the one it began on; end it on the thread that began it");
  }
  if (context_.in_call()) {
    throw UsageError("a step was ended inside of one of its calls; end it after that call has returned");
  }
}

void EngineState::close_step(bool failed) noexcept {
  try {
    try {
      check_end_of_step();
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

void EngineState::copied_in_graph(const CopyCounts& copies) noexcept {
  if (step_) {
    resources_.mover->count_launched(copies);
  } else {
    counts_.copied(copies);
  }
}

}  // namespace sidestream
