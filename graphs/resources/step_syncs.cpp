#include "graphs/resources/step_syncs.h"

#include <algorithm>

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include "offload/saved_tensor_recorder.h"

namespace sidestream {
namespace {

/// The innermost scope of the calling thread; null outside of all.
const std::string* current_scope() {
  const SavedTensorRecorder* recorder = current_recorder();
  return recorder != nullptr && recorder->depth() > 1 ? &recorder->scope().name : nullptr;
}

}  // namespace

thread_local constinit const std::string* StepSyncs::InCall::current_ = nullptr;

StepSyncs::StepSyncs(c10::DeviceType type)
    : finder_(
          type, [this] { return place(); }, [this](auto edge) { pass(edge); }) {}

void StepSyncs::begin_step(std::optional<SyncFinder::Step>& step, std::int64_t captures) {
  constexpr std::int64_t kUntilSteady = 2;
  captures += finder_.unsettled();  // those of other engines, in a step of this one
  steps_alike_ = captures == captures_ ? steps_alike_ + 1 : 0;
  captures_ = captures;
  {
    const std::lock_guard lock(mutex_);
    made_.clear();
    made_by_ = at::RecordFunction::currentThreadId();
  }
  step.emplace(finder_, /*steady=*/steps_alike_ > kUntilSteady);
  mark(at::sequence_number::peek());
}

// In a backward the thread does not show the place; the place where its node was made does. A thread numbers its nodes in order.
WaitPlace StepSyncs::place() const {
  WaitPlace place{InCall::current(), current_scope(), {}};
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr) {
    return place;
  }
  place.node = node->name();
  const std::lock_guard lock(mutex_);
  if (place.call != nullptr || node->thread_id() != made_by_) {
    return place;  // a checkpoint's forward, or another thread's node
  }
  const auto after = std::upper_bound(made_.begin(), made_.end(), node->sequence_nr(),
                                      [](std::uint64_t number, const Made& made) { return number < made.node; });
  if (after != made_.begin() && node->sequence_nr() != UINT64_MAX) {  // the number of those that accumulate gradients
    place.call = std::prev(after)->call;
    place.scope = std::prev(after)->scope;
  }
  return place;
}

void StepSyncs::mark(std::uint64_t from) {
  const Made now{from, InCall::current(), current_scope()};
  const std::lock_guard lock(mutex_);
  if (made_by_ != at::RecordFunction::currentThreadId()) {
    return;  // a call inside of a backward
  }
  made_until_ = from;
  if (made_.empty() || made_.back().call != now.call || made_.back().scope != now.scope) {
    made_.push_back(now);
  }
}

void StepSyncs::pass(SyncFinder::OperatorEdge edge) {
  switch (edge) {
    case SyncFinder::OperatorEdge::begins:
      mark(made_until_);
      break;
    case SyncFinder::OperatorEdge::ends:
      made_until_ = at::sequence_number::peek();
      break;
  }
}

void StepSyncs::InCall::enter(const std::string& name) {
  current_ = current_ == nullptr ? &name : current_;
  syncs_->mark(at::sequence_number::peek());
}

void StepSyncs::InCall::leave() {
  current_ = before_;
  syncs_->mark(at::sequence_number::peek());
}

}  // namespace sidestream
