#pragma once
#include <cstdint>

#include "base/thread_stack.h"

namespace sidestream {

class EngineState;

/// What `ss::call` meets: which engine serves it on a thread, and what it runs inside of.
/// Threads: the step's.
class CallContext {
 public:
  enum class Phase : std::uint8_t {
    open,                 ///< a call may be recorded or replayed
    inside_graphed_call,  ///< the body of a recorded call runs: calls inside it are scopes only
    plain,                ///< a graphed step or a verified call runs eagerly: the same, also of callables
    capturing,            ///< bodies run for a capture: likewise
  };

  explicit CallContext(EngineState& engine) noexcept : engine_(engine) {}
  CallContext(const CallContext&) = delete;
  CallContext& operator=(const CallContext&) = delete;
  ~CallContext() = default;

  [[nodiscard]] Phase phase() const noexcept { return phase_; }
  /// False if callables too are scopes only: in this engine, or in another one that is active on the calling thread.
  [[nodiscard]] bool callables_replay() const noexcept {
    const CallContext* const active = ThreadStack<const CallContext>::top();
    return lets_replay() && (active == nullptr || active->lets_replay());
  }
  /// A body runs eagerly in which calls are scopes only.
  [[nodiscard]] bool inside_body() const noexcept {
    return phase_ == Phase::inside_graphed_call || phase_ == Phase::plain;
  }
  /// The body of a call runs, in whatever phase.
  [[nodiscard]] bool in_call() const noexcept { return calls_ > 0; }
  /// The engine whose step or capture runs on the calling thread, or null.
  [[nodiscard]] static EngineState* active() noexcept {
    const CallContext* const context = ThreadStack<const CallContext>::top();
    return context == nullptr ? nullptr : &context->engine_;
  }

  /// The engine serves the calling thread for its lifetime. May end in any order with those of other engines.
  class [[nodiscard]] OnThread {
   public:
    /// `pool`: see ThreadStack::Entry.
    explicit OnThread(const CallContext& context, BlockPool* pool = nullptr) : entry_(&context, pool) {}
    OnThread(const OnThread&) = delete;
    OnThread& operator=(const OnThread&) = delete;
    ~OnThread() = default;

   private:
    ThreadStack<const CallContext>::Entry entry_;
  };

  /// The body of a call runs for its lifetime, and calls inside of it run in `phase`.
  class [[nodiscard]] Enter {
   public:
    Enter(CallContext& context, Phase phase) noexcept : context_(context), before_(context.phase_) {
      context_.phase_ = phase;
      ++context_.calls_;
    }
    Enter(const Enter&) = delete;
    Enter& operator=(const Enter&) = delete;
    ~Enter() {
      context_.phase_ = before_;
      --context_.calls_;
    }

   private:
    CallContext& context_;
    Phase before_;
  };

 private:
  [[nodiscard]] bool lets_replay() const noexcept {
    return phase_ == Phase::open || phase_ == Phase::inside_graphed_call;
  }

  EngineState& engine_;
  Phase phase_ = Phase::open;
  int calls_ = 0;
};

}  // namespace sidestream
