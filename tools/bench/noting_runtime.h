#pragma once
#include <utility>
#include <variant>
#include <vector>

#include "runtime/forwarding_runtime.h"

namespace sidestream::bench {

/// Notes the launches, records and waits that an engine queues, so that the same may be queued without it.
class NotingRuntime final : public ForwardingRuntime {
 public:
  using ForwardingRuntime::ForwardingRuntime;
  using ForwardingRuntime::record;
  using ForwardingRuntime::wait;

  void note(bool on) { on_ = on; }
  /// What was noted since the last call.
  [[nodiscard]] auto take() { return std::exchange(calls_, {}); }

  void record(const Event& event, c10::Stream stream) override { noted(Record<Event>{&event, stream}); }
  void wait(c10::Stream stream, const Event& event) override { noted(Wait<Event>{&event, stream}); }
  void record(const ExternalEvent& event, c10::Stream stream) override { noted(Record<ExternalEvent>{&event, stream}); }
  void wait(c10::Stream stream, const ExternalEvent& event) override { noted(Wait<ExternalEvent>{&event, stream}); }
  void launch(const Graph& graph, c10::Stream stream) override { noted(Launch{&graph, stream}); }

 private:
  template <class AnyEvent>
  struct Record {
    const AnyEvent* event;
    c10::Stream stream;
    void run(Runtime& runtime) const { runtime.record(*event, stream); }
  };
  template <class AnyEvent>
  struct Wait {
    const AnyEvent* event;
    c10::Stream stream;
    void run(Runtime& runtime) const { runtime.wait(stream, *event); }
  };
  struct Launch {
    const Graph* graph;
    c10::Stream stream;
    void run(Runtime& runtime) const { runtime.launch(*graph, stream); }
  };

 public:
  using Call = std::variant<Record<Event>, Wait<Event>, Record<ExternalEvent>, Wait<ExternalEvent>, Launch>;
  using Calls = std::vector<Call>;

 private:
  template <class Any>
  void noted(const Any& call) {
    if (on_) {
      calls_.emplace_back(call);
    }
    call.run(inner());
  }

  bool on_ = false;
  Calls calls_;
};

}  // namespace sidestream::bench
