// The engine as programs see it: OffloadEngine, and the steps and chunks that it begins.
#include "sidestream/engine.h"

#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "graphs/engine/engine_state.h"
#include "offload/kept_failure.h"
#include "offload/name_pattern.h"
#include "sidestream/chunk.h"
#include "sidestream/error.h"

namespace sidestream {

Step::Step(std::shared_ptr<EngineState> state, const std::vector<PipelineStep>* order)
    : state_(std::move(state)), exceptions_(std::uncaught_exceptions()) {
  state_->begin_step(order);
}

void Step::finish() {
  if (state_ == nullptr) {
    return;
  }
  state_->check_end_of_step();
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
  return Step(state_, nullptr);
}

Step OffloadEngine::step(const std::vector<PipelineStep>& order) {
  (void)state();
  return Step(state_, &order);
}

Chunk OffloadEngine::chunk(ChunkId id) {
  (void)state();
  return EngineState::begin_chunk(state_, id);
}

Journal OffloadEngine::journal() const { return state().journal(); }

Report OffloadEngine::report() const { return state().report(); }

std::string OffloadEngine::trace_json() const { return state().trace_json(); }

std::vector<std::string> OffloadEngine::write_graphs(const std::string& folder) const {
  return state().write_graphs(folder);
}

void OffloadEngine::reset() { state().reset(); }

void OffloadEngine::backward_dw() { state().backward_dw(); }

void OffloadEngine::backward_dw(ChunkId id) { state().backward_dw(id); }

void OffloadEngine::set_activation_offloading(const torch::nn::Module& module, bool on) {
  state().set_activation_offloading({state().calls().patterns_of(module)}, on);
}

void OffloadEngine::set_activation_offloading(const std::string& patterns, bool on) {
  const NamePatterns all = NamePatterns::parse(patterns);
  std::vector<NamePatterns> named;
  for (const std::string& pattern : all.patterns()) {
    named.push_back(NamePatterns({pattern}));
  }
  if (named.empty()) {
    throw UsageError("OffloadEngine::set_activation_offloading: no scope is named; \"all\" names all scopes");
  }
  state().set_activation_offloading(named, on);
}

void OffloadEngine::mark_not_offload(const at::Tensor& tensor) { state().mark_not_offload(tensor); }

Chunk::Chunk(std::shared_ptr<EngineState> state, std::uint64_t number) noexcept
    : state_(std::move(state)), number_(number), thread_(std::this_thread::get_id()) {}

Chunk::Chunk(Chunk&& other) noexcept
    : state_(std::move(other.state_)), number_(other.number_), thread_(other.thread_) {}

void Chunk::check_thread(const char* what) const {
  if (thread_ != std::this_thread::get_id()) {
    throw UsageError(std::string("a chunk was ") + what +
                     " on another thread than the one it began on; use a chunk on the thread of its step");
  }
}

void Chunk::resume() {
  if (state_ != nullptr) {
    check_thread("resumed");
  }
  if (state_ == nullptr || !state_->chunks().resume(number_)) {
    throw UsageError(
        "Chunk::resume was called on a chunk that has ended, or whose step has; resume chunks that are open");
  }
}

void Chunk::finish() {
  if (state_ == nullptr) {
    return;
  }
  check_thread("ended");
  if (!std::exchange(state_, nullptr)->chunks().end(number_)) {
    throw UsageError("a chunk was ended after its step; end it before the step ends");
  }
}

Chunk::~Chunk() {
  if (state_ == nullptr) {
    return;
  }
  if (thread_ == std::this_thread::get_id()) {
    (void)state_->chunks().end(number_);  // if its step has ended before, the step's end found it open
  } else {
    log_failure(std::make_exception_ptr(UsageError("a chunk was destroyed on another thread than it began on")),
                "the end of its step will throw an error");
  }
}

}  // namespace sidestream
