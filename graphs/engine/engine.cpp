#include "sidestream/engine.h"

#include <exception>

#include "graphs/engine/engine_state.h"

namespace sidestream {

Step::Step(std::shared_ptr<EngineState> state) : state_(std::move(state)), exceptions_(std::uncaught_exceptions()) {
  state_->begin_step();
}

Step::~Step() noexcept(false) {
  if (state_ == nullptr) {
    return;
  }
  if (std::uncaught_exceptions() > exceptions_) {
    try {
      state_->end_step(/*failed=*/true);
    } catch (const std::exception&) {  // the exception on its way says more
    }
  } else {
    state_->end_step(/*failed=*/false);
  }
}

OffloadEngine::OffloadEngine(torch::nn::Module& model, Options options)
    : state_(std::make_shared<EngineState>(model, std::move(options))) {}

OffloadEngine::OffloadEngine(std::shared_ptr<EngineState> state) : state_(std::move(state)) {}

OffloadEngine::~OffloadEngine() = default;

Step OffloadEngine::step() { return Step(state_); }

Journal OffloadEngine::journal() const { return state_->journal(); }

Report OffloadEngine::report() const { return state_->report(); }

void OffloadEngine::reset() { state_->reset(); }

void OffloadEngine::mark_not_offload(const at::Tensor& tensor) { state_->exclusions().mark(tensor); }

}  // namespace sidestream
