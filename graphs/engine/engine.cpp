#include "sidestream/engine.h"

#include <exception>

#include "graphs/engine/engine_state.h"
#include "sidestream/error.h"

namespace sidestream {

Step::Step(std::shared_ptr<EngineState> state) : state_(std::move(state)), exceptions_(std::uncaught_exceptions()) {
  state_->begin_step();
}

void Step::finish() {
  if (state_ == nullptr) {
    return;
  }
  state_->check_thread_of_step();
  const std::shared_ptr<EngineState> state = std::move(state_);
  state->end_step(/*failed=*/false);
}

Step::~Step() {
  if (state_ != nullptr) {
    state_->close_step(/*failed=*/std::uncaught_exceptions() > exceptions_);
  }
}

OffloadEngine::OffloadEngine(torch::nn::Module& model, Options options)
    : state_(std::make_shared<EngineState>(model, std::move(options))) {}

OffloadEngine::OffloadEngine(std::shared_ptr<EngineState> state) : state_(std::move(state)) {}

OffloadEngine::~OffloadEngine() = default;

EngineState& OffloadEngine::state() const {
  if (state_ == nullptr) {
    throw UsageError("this OffloadEngine was moved from; use the one that it was moved to");
  }
  return *state_;
}

Step OffloadEngine::step() {
  (void)state();
  return Step(state_);
}

Journal OffloadEngine::journal() const { return state().journal(); }

Report OffloadEngine::report() const { return state().report(); }

std::vector<std::string> OffloadEngine::write_graphs(const std::string& folder) const {
  return state().write_graphs(folder);
}

void OffloadEngine::reset() { state().reset(); }

void OffloadEngine::mark_not_offload(const at::Tensor& tensor) { state().exclusions().mark(tensor); }

}  // namespace sidestream
