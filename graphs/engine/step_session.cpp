#include "graphs/engine/step_session.h"

#include <algorithm>

#include "graphs/engine/eager_plan.h"
#include "graphs/engine/engine_resources.h"
#include "graphs/engine/recorded_calls.h"
#include "graphs/engine/report_builder.h"

namespace sidestream {

StepSession::StepSession(EngineResources& resources, const CallContext& context, const EagerPlan& plan,
                         const RecordedCalls& recorded, ReportBuilder& report)
    : resources_(resources), recorded_(recorded) {
  Exclusions& exclusions = resources.exclusions;
  if (plan.state() == EagerPlan::State::unsized) {
    exclusions.reset_tallies();
    sizing_ = std::make_shared<SizingMover>([this, &report] { report.unseen(unseen_bytes()); });
    recorder_ = std::make_unique<Recorder>(resources.tree, exclusions, sizing_, nullptr);
  } else {
    resources.eager->begin_step();
    recorder_ = std::make_unique<Recorder>(resources.tree, exclusions, resources.eager, &plan.pass());
  }
  allocated_at_begin_ = resources.runtime->memory_stats().allocated;
  resources.runtime->reset_peak_memory_stats();
  recording_.emplace(recorder_.get());
  resources.check.journal_step(journaling_, report.steps());
  on_thread_.emplace(context);
}

std::int64_t StepSession::unseen_bytes() const {
  const std::int64_t grown = resources_.runtime->memory_stats().allocated - allocated_at_begin_;
  const auto known = static_cast<std::int64_t>(recorder_->saved_bytes() + recorded_.kept_bytes());
  return std::max<std::int64_t>(0, grown - known);
}

void StepSession::leave_thread() noexcept {
  on_thread_.reset();
  recording_.reset();
  journaling_.reset();
}

void StepSession::stop_sizing() noexcept {
  if (sizing_ != nullptr) {
    sizing_->pass_ended();
  }
}

}  // namespace sidestream
