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

  /// What was noted since the last call, cut behind each launch and the waits for it.
  [[nodiscard]] std::vector<Calls> take_by_launch() {
    std::vector<Calls> all(1);
    bool launched = false;
    for (const Call& call : calls_) {
      const bool waits = std::holds_alternative<Wait<Event>>(call) || std::holds_alternative<Wait<ExternalEvent>>(call);
      if (launched && !waits) {
        all.emplace_back();
        launched = false;
      }
      all.back().push_back(call);
      launched = launched || std::holds_alternative<Launch>(call);
    }
    if (!launched && all.size() > 1) {  // what follows the last one
      const Calls rest = std::move(all.back());
      all.pop_back();
      all.back().insert(all.back().end(), rest.begin(), rest.end());
    }
    calls_.clear();
    return all;
  }

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
