#include "sidestream/chunk.h"

#include <exception>
#include <string>
#include <utility>

#include "graphs/engine/engine_state.h"
#include "offload/kept_failure.h"
#include "sidestream/error.h"

namespace sidestream {

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
