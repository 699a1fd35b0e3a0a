#include "graphs/engine/step_session.h"

#include <algorithm>

#include "graphs/calls/engine_counts.h"
#include "graphs/calls/recorded_calls.h"
#include "graphs/resources/eager_plan.h"
#include "graphs/resources/engine_resources.h"

namespace sidestream {

StepSession::StepSession(EngineResources& resources, const CallContext& context, const EagerPlan& plan,
                         const RecordedCalls& recorded, EngineCounts& counts)
    : resources_(resources),
      recorded_(recorded),
      shortage_(resources),
      kind_(plan.state() == EagerPlan::State::unsized ? Kind::sizing : Kind::planned) {
  Exclusions& exclusions = resources.exclusions;
  if (kind_ == Kind::sizing) {
    resources.arena->open();
    if (!resources.graphed.empty()) {
      resources.rest->step_begins();
    }
  }
  recorder_.emplace(resources.tree, exclusions, resources.eager, kind_ == Kind::sizing ? nullptr : &plan.pass(),
                    resources.books);
  allocated_at_begin_ = resources.runtime->memory_stats().allocated;
  recording_.emplace(&*recorder_);
  if (resources.syncs != nullptr) {
    resources.syncs->begin_step(finding_syncs_, counts.report.captures);
  }
  resources.check.journal_step(journaling_, counts.report.steps);
  on_thread_.emplace(context, &recorder_->blocks());
  if (kind_ == Kind::sizing) {
    resources.eager->begin_sizing_step(
        [this, &counts](std::int64_t away) { counts.report.unseen_bytes = unseen_bytes(away); });
  } else {
    resources.eager->begin_step();
  }
}

StepSession::~StepSession() {
  stop_sizing();
  if (!copies_ended_) {  // the engine is destroyed before the step: the mover and the storages of running copies own each other
    try {
      resources_.eager->end_step();
    } catch (...) {  // no caller is left that could get the error
    }
  }
}

void StepSession::end_copies() {
  copies_ended_ = true;
  resources_.eager->end_step();
}

std::int64_t StepSession::unseen_bytes(std::int64_t away) const {
  const std::int64_t grown = resources_.runtime->memory_stats().allocated + away - allocated_at_begin_;
  const auto known = static_cast<std::int64_t>(recorder_->saved_bytes() + recorded_.kept_bytes());
  return std::max<std::int64_t>(0, grown - known);
}

void StepSession::leave_thread() noexcept {
  on_thread_.reset();
  recording_.reset();
  journaling_.reset();
  finding_syncs_.reset();
}

void StepSession::stop_sizing() noexcept {
  if (kind_ == Kind::sizing && !sizing_peak_) {
    sizing_peak_ = resources_.eager->end_sizing_step();
    resources_.rest->close();
  }
}

}  // namespace sidestream
