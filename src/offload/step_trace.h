#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Stream.h>

#include "analysis/traced_step.h"
#include "runtime/live_memory.h"
#include "runtime/runtime.h"

namespace sidestream {

/// What one step of an engine means for the device: when each graph and copy ran, how long compute stood still for copies, and the peak of
/// live memory from one to the next. Steps that are not traced pay one load for each graph, copy of a group, and wait.
///
/// Ordering: adds timing events on the streams of the graphs and copies.  Capture: illegal.
/// Threads: the step's; spans on any.
class StepTrace {
 public:
  /// One graph, for those who plan with what was measured.
  struct Launch {
    const void* owner = nullptr;  ///< the sequence of the graph; only compared
    std::size_t graph_index = 0;
    std::int64_t during = 0;  ///< peak of live bytes while the graph runs
    std::int64_t after = 0;   ///< and from then until the next launch or the end
    double waited = 0;        ///< seconds that its stream waited, since the launch before; 0 without a clock
    double ran = 0;           ///< seconds; 0 without a clock
  };
  struct Launches {
    std::vector<Launch> launches;
    std::int64_t peak_before = 0;  ///< of live bytes, before the first
  };

  /// A moment on one stream.
  struct Mark {
    std::shared_ptr<const Event> event;  ///< null without a clock
    double issued = 0;                   ///< by the host, in seconds since the step began
  };

  /// On one stream, from `begin` to `end`. Does nothing in steps that are not traced.
  class Span {
   public:
    /// Does nothing if it has begun. `name`: null for that of the innermost Site.
    void begin(StepTrace& trace, SpanKind kind, c10::Stream stream, const char* name = nullptr) {
      if (trace.on() && trace_ == nullptr) {
        start(trace, kind, stream, name);
      }
    }
    /// May begin again after it.
    void end(std::int64_t bytes = 0) {
      if (trace_ != nullptr) {
        finish(bytes);
      }
    }

   private:
    void start(StepTrace& trace, SpanKind kind, c10::Stream stream, const char* name);
    void finish(std::int64_t bytes);
    StepTrace* trace_ = nullptr;
    std::optional<c10::Stream> stream_;
    SpanKind kind_ = SpanKind::wait;
    std::string name_;
    Mark begin_;
  };

  /// Around the launch of one graph. Does nothing in steps that are not traced.
  class Graph {
   public:
    /// `side` waits for all that the graph needs.
    Graph(StepTrace& trace, SpanKind kind, c10::Stream side);
    /// The graph was launched. LiveMemory has not been told.
    void launched(const void* owner, std::size_t graph_index);
    /// LiveMemory was told.
    void counted();

   private:
    StepTrace* trace_;  ///< null if the step is not traced
    SpanKind kind_;
    c10::Stream side_;
    Mark begin_;
  };

  /// What ends while it lives belongs to that chunk.
  class InChunk {
   public:
    /// `number` counts the chunks of all steps; 0 if it is not known.
    InChunk(StepTrace& trace, std::uint64_t number) : trace_(trace), before_(trace.chunk()) {
      if (number != 0) {
        trace_.enter_chunk(number);
      }
    }
    InChunk(const InChunk&) = delete;
    InChunk& operator=(const InChunk&) = delete;
    ~InChunk() { trace_.enter_chunk(before_); }

   private:
    StepTrace& trace_;
    std::uint64_t before_;
  };

  explicit StepTrace(std::shared_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {}

  /// Begins a planned step. `captures`: the number of graphs captured so far. The step is traced if it is `wanted`, or if it is the second
  /// step with this number. If the previous trace was not read yet, the host first waits until that traced step is done.
  void step_begins(std::int64_t captures, bool wanted);
  /// Its work is queued. `describe` puts into a span the chunk with that number. False if it was not traced.
  bool step_ended(std::int64_t number, const std::function<void(std::uint64_t, TracedSpan&)>& describe);
  void step_failed() noexcept;
  /// The captures are dropped: the next planned step but one is traced.
  void begin_anew() noexcept { captures_ = -1; }

  [[nodiscard]] bool on() const noexcept { return on_.load(std::memory_order_relaxed); }
  [[nodiscard]] std::uint64_t chunk() const noexcept { return chunk_.load(std::memory_order_relaxed); }
  void enter_chunk(std::uint64_t number) noexcept { chunk_.store(number, std::memory_order_relaxed); }
  /// Only while it is `on`: memory is counted anew from here on, which is now on that stream. Not between the two calls of Graph.
  void look(c10::Stream stream);

  /// The latest step that was traced. Blocks the host until its work is done, once. Empty if there is none, or if the device has failed.
  [[nodiscard]] const TracedStep& step();
  /// Of that step.
  [[nodiscard]] Launches launches();

 private:
  struct Traced {
    TracedSpan span;
    c10::Stream stream;
    Mark begin;
    Mark end;
    std::uint64_t chunk = 0;
    const void* owner = nullptr;  ///< of a graph
    std::size_t graph_index = 0;
    std::size_t point = 0;  ///< of a graph: of `points_`, while it runs
  };
  struct Point {
    Mark at;
    std::int64_t live = 0;
  };

  [[nodiscard]] Mark mark(c10::Stream stream) const;
  /// With the mutex held: memory before it is counted, and counted anew from there.
  void begin_point(const Mark& at);
  void resolve();
  [[nodiscard]] double seconds_at(const Mark& mark) const;

  std::shared_ptr<Runtime> runtime_;
  std::atomic<bool> on_{false};
  std::atomic<std::uint64_t> chunk_{0};
  std::atomic<double> own_{0};                      ///< seconds of the host that the trace has taken
  std::int64_t captures_ = -1;                      ///< when the latest step began
  std::int64_t steps_ = 0;                          ///< since then
  double began_ = 0;                                ///< on the host's clock
  std::mutex mutex_;                                ///< for all below
  std::optional<LiveMemory::Measurement> segment_;  ///< of the latest point
  Mark begin_;
  Mark end_;
  std::vector<Traced> traced_;
  std::vector<Point> points_;
  bool resolved_ = true;
  TracedStep step_;
};

}  // namespace sidestream
